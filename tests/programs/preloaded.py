"""What all programs import, for the server that forks their processes."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis.strategies
import keras
import torch
import torch._dynamo
import torch.testing._internal.distributed.multi_threaded_pg

import ocomm_tf.keras
import ocomm_torch
import ocomm_torch.distributed
import tests.faults.world
import tests.frontends.every_kind

__all__ = ["hypothesis", "keras", "ocomm_tf", "ocomm_torch", "tests", "torch"]
torch.set_num_threads(1)

# What is imported here is no garbage: a collection in a child would look at all of it, for a second.
gc.freeze()
