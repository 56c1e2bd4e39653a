"""hivemind's averages of gradients in 8 bits: as ``step`` measures them, and what they do to a loss.

``pip install hivemind==1.1.12 'numpy<2.4'``: its codec does not run on a newer NumPy. An average is hivemind's own,
over its libp2p daemon. While a step computes, peers find each other for its average, as in hivemind's Optimizer. Peers'
averages differ by their last rounding, so that their parameters drift apart, and its Optimizer averages them, too, in
every step by default: here in every tenth, and their time is left out, to hivemind's favour.
"""

from __future__ import annotations

import atexit
import itertools
from typing import Any

import hivemind
import numpy as np
import torch
import torch.distributed as dist
from hivemind.compression import CompressionInfo, Uniform8BitQuantization
from torch import nn

import ocomm_torch as hvd

if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    # With it each peer's codec raises, and hivemind goes on with the peer's own gradients and a warning.
    raise ImportError(f"hivemind 1.1.12 cannot average in 8 bits with NumPy {np.__version__}: it needs one before 2.4")

#: Seconds that peers look for each other; an answer has to come sooner. hivemind's own 5 and 3 are made for peers that
#: come and go.
MATCHMAKING_S, REQUEST_S = 0.5, 0.3
#: Seconds after which an average has failed.
LONGEST_S = 600.0
#: Steps between two averages of parameters.
STATE_EVERY = 10


class Averager:
    """The peers are the ranks of the job. Collective."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        listens = {"host_maddrs": ["/ip4/0.0.0.0/tcp/0"]}
        first = hivemind.DHT(start=True, **listens) if hvd.rank() == 0 else None
        addresses = [str(each) for each in first.get_visible_maddrs()] if first is not None else []
        addresses = hvd.broadcast_object(addresses, 0)
        dht = first if first is not None else hivemind.DHT(initial_peers=addresses, start=True, **listens)
        self._averager = hivemind.DecentralizedAverager(
            [torch.zeros_like(parameter) for parameter in self._parameters],
            dht,
            prefix="gradients",
            target_group_size=hvd.size(),
            min_group_size=hvd.size(),
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=REQUEST_S,
            compression=Uniform8BitQuantization(),
            start=True,
        )
        atexit.register(dht.shutdown)
        atexit.register(self._averager.shutdown)
        self._round: Any = None

    def begin(self) -> None:
        """Looks for the other peers, while gradients are computed."""
        self._round = self._averager.step(wait=False, require_trigger=True, timeout=LONGEST_S)

    def finish(self) -> None:
        """Makes gradients their averages."""
        gradients = [parameter.grad for parameter in self._parameters]
        with self._averager.get_tensors() as tensors:
            torch._foreach_copy_(list(tensors), gradients)
        self._round.allow_allreduce()
        if self._round.result(LONGEST_S) is None:
            raise RuntimeError("hivemind's peers have not found each other for an average.")
        with self._averager.get_tensors() as tensors:
            torch._foreach_copy_(gradients, list(tensors))


class Simulated(torch.optim.Adam):
    """Steps by the averages that ``Averager`` would make, with hivemind's codec over torch's sums.

    A gradient's average is made by one of the ranks, each of which makes those of as many elements. What others send
    to it, and by how much its average differs from that, is in codes. Averages of parameters are exact.
    """

    _steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        numels = [gradient.numel() for gradient in gradients]
        ends = list(itertools.accumulate(numels))
        owned = [
            int(ranks * (end - gradient.numel() / 2) / ends[-1]) == rank
            for gradient, end in zip(gradients, ends, strict=True)
        ]
        sent = [g if own else _coded(g) for g, own in zip(gradients, owned, strict=True)]
        total = torch.cat([each.view(-1) for each in sent])
        dist.all_reduce(total)
        averages = torch.split(total / ranks, numels)
        for gradient, own, part, average in zip(gradients, owned, sent, averages, strict=True):
            change = average.view_as(part) - part
            gradient += change if own else _coded(change)
        super().step(closure)
        self._steps += 1
        if self._steps % STATE_EVERY == 0:
            total = torch.cat([parameter.view(-1) for parameter in parameters])
            dist.all_reduce(total)
            for parameter, average in zip(parameters, torch.split(total / ranks, numels), strict=True):
                parameter.copy_(average.view_as(parameter))


def _coded(tensor: torch.Tensor) -> torch.Tensor:
    codec = Uniform8BitQuantization()
    return codec.extract(codec.compress(tensor, CompressionInfo.from_tensor(tensor)))
