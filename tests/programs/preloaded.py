"""What all programs of Torch import, for the server that forks their processes."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch._dynamo
import torch.testing._internal.distributed.multi_threaded_pg

import ocomm_torch
import ocomm_torch.distributed
import tests.faults.world
import tests.frontends.every_kind

__all__ = ["ocomm_torch", "tests", "torch"]
torch.set_num_threads(1)
