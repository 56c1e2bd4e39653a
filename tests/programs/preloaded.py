"""What all programs of Torch import, for the server that forks their processes."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch._dynamo

import ocomm_torch
import tests.faults.world
import tests.frontends.every_kind

__all__ = ["ocomm_torch", "tests", "torch"]
torch.set_num_threads(1)
