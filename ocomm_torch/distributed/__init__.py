"""The backend "ocomm" of torch.distributed: process groups of CPU tensors on ocomm's plans and network.

``import ocomm_torch.distributed`` registers the backend, and so does the entry point of an installed ocomm. After that
``torch.distributed.init_process_group("ocomm")`` works in every process that an MPI launcher has started.
"""

import ocomm_torch.distributed.joins  # noqa: F401 (Torch's join keeps works from now on)
from ocomm.torch_registration import register
from ocomm_torch.distributed.group import OcommProcessGroup
from ocomm_torch.distributed.start import create, rendezvous

__all__ = ["OcommProcessGroup", "create", "rendezvous"]

register(create, rendezvous)
