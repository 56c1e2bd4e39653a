"""Ranks of a job in which ocomm and torch's own backend take turns."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import ocomm_torch as hvd


def start(threads: int) -> tuple[int, int]:
    """Starts ocomm, and torch.distributed over gloo with the same ranks; this rank and their number. Collective.

    ``threads``: of Torch, per rank. BENCH_MASTER is the address of rank 0's host, this one by default.
    """
    torch.set_num_threads(threads)
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    address = hvd.broadcast_object(os.environ.get("BENCH_MASTER", "127.0.0.1"), 0)
    store = dist.TCPStore(address, 29511, ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return rank, ranks
