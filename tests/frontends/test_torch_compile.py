"""Training steps beneath torch.compile: exchanges stay out of the graphs, and give what they give without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ocomm.session import Session
from ocomm_torch import DistributedBirder, DistributedOneBitAdam, DistributedOptimizer
from tests.frontends.onebit_jobs import digest
from tests.frontends.test_torch_edits import Parameters, compressed, grads, same_everywhere, train
from tests.worlds import MPI_SIZE, run_ranks

# While one thread of a process compiles, Torch's Adam in the others rounds as in a graph.
pytestmark = pytest.mark.skipif(not MPI_SIZE, reason="ranks that compile must be processes: runs under mpirun")

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "dense": lambda model: DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters()),
    "1-bit Adam": lambda model: DistributedOneBitAdam(torch.optim.Adam(model.parameters()), freeze_step=2),
    "Birder": lambda model: DistributedBirder(torch.optim.SGD(model.parameters(), lr=1e-3)),
}


def whole_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def passes(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


@pytest.mark.parametrize("compiled", [whole_step, passes], ids=lambda function: function.__name__)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_steps_in_a_compiled_function_equal_those_in_a_plain_one(
    wrap: Callable[[Any], Any], compiled: Callable[..., None]
) -> None:
    def body(session: Session) -> tuple[str, str]:
        rank = session.require_topology().rank

        def train(step: Callable[..., None]) -> str:
            generator = torch.Generator().manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.ReLU(), torch.nn.Linear(9, 2))
            for p in model.parameters():
                p.data = torch.randn(p.shape, generator=generator)
            optimizer = wrap(model)
            for _ in range(4):
                if compiled is passes:
                    optimizer.zero_grad()
                step(model, optimizer, torch.randn(5, 6, generator=generator) + rank)
                if compiled is passes:
                    optimizer.step()
            return digest([p.detach().numpy() for p in model.parameters()])

        return train(torch.compile(compiled, backend="eager")), train(compiled)

    for traced, plain in run_ranks(2, body):
        assert traced == plain


def test_a_compiled_function_that_changes_gradients_is_noticed_and_compiled_once() -> None:
    """By versions: what a graph does to its inputs comes by no hook of Torch's."""
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(backend=counting, fullgraph=True)
    def halve(gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            gradient[0].mul_(0.5)

    def edit(parameters: Parameters) -> None:
        halve(grads(parameters)[:3])

    assert same_everywhere(lambda: train(compressed(), edit)) == same_everywhere(
        lambda: train(compressed(overlap=False), edit)
    )
    assert len(graphs) <= 4  # plain and on their way
