"""What the dense steps of large models cost on a GPU, counted without one."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.collectives.pipeline import LARGEST_MESSAGE_NBYTES, cut_of
from ocomm.collectives.plan import Message, Offload, Plan, in_pieces
from ocomm.compression.layout import Layout, TensorSpec
from ocomm.kernels.device import Verb, device_kernels
from ocomm.optim.flows import Flows
from ocomm.optim.onebit_adam import OneBitAdam, OneBitAdamOptions
from ocomm.optim.step_channel import StepChannel
from ocomm.types import Nodes, Settings
from tests.counting_device import CountingDevice


def gpt(vocabulary: int, width: int, layers: int, context: int) -> list[tuple[int, ...]]:
    """The shapes of a GPT's parameters in the order of registration."""
    square, wide = (3 * width, width), (4 * width, width)
    block = [(width,), (width,), square, square[:1], (width, width), (width,), (width,), (width,), wide, wide[:1]]
    block += [(width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *(layers * block), (width,), (width,)]


GPT2 = gpt(50257, 768, 12, 1024)
LARGE = gpt(50257, 2048, 24, 2048)  # 1.3 G parameters


class CountingChannel:
    """Prepares plans, and runs none."""

    def prepare(self, plan: Plan) -> Plan:
        for segment in plan.segments:
            for stage in segment:
                for computation in stage.compute:
                    if isinstance(computation, Offload):
                        computation.task.compiled()  # type: ignore[attr-defined]
        return plan


def dense_step(shapes: list[tuple[int, ...]], ranks: int, hosts: int) -> tuple[int, int, CountingDevice]:
    """Makes the flow of a warm-up step on one of ``ranks`` ranks. Returns its elements, its segments and its device."""
    device = CountingDevice()
    layout = Layout([TensorSpec(f"t{n}", shape) for n, shape in enumerate(shapes)], ranks)
    core = OneBitAdam(layout, 0, device_kernels(device), OneBitAdamOptions())
    channel: Any = CountingChannel()
    wire = StepChannel("count", channel, range(ranks), 0, Nodes.flat(ranks), cast(Any, None), 0.0)
    cut = cut_of(layout.numel, ranks, hosts, Settings().segment_nbytes, on_devices=True)
    flows = Flows(core, wire, cut)
    flows.arrange()
    assert flows.dense is not None
    flows.dense.prepare()
    device.nbytes -= flows.averages.nbytes
    return layout.numel, len(flows.dense.segments), device


@pytest.mark.parametrize("hosts", [1, 2])
def test_dense_messages_of_two_ranks_take_less_than_a_byte_per_parameter(hosts: int) -> None:
    numel, segments, device = dense_step(GPT2, 2, hosts)
    assert numel == 124_439_808
    assert segments <= 64
    assert device.launches() <= 4 * segments
    assert device.allocations <= 32
    assert device.pinned_nbytes <= 0.6 * numel
    assert device.nbytes <= 0.6 * numel


def test_a_warm_up_step_of_one_rank_stages_nothing_and_copies_flags_alone() -> None:
    numel, segments, device = dense_step(GPT2, 1, 1)
    assert segments <= 64
    assert device.launches() <= 2 * segments
    assert device.allocations <= 16
    assert device.copied(Verb.UPLOAD) == 0
    assert device.copied(Verb.DOWNLOAD) == 4 * segments
    assert device.pinned_nbytes <= 1 << 17  # flags
    assert device.nbytes <= 0.03 * numel  # tables of runs and blocks


def test_the_lanes_of_a_large_model_are_no_larger() -> None:
    numel, segments, device = dense_step(LARGE, 2, 2)
    assert numel == 1_315_723_264
    assert segments <= 640
    assert device.allocations <= 100
    assert device.pinned_nbytes <= 70 << 20
    assert device.nbytes <= 0.1 * numel


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 2), (8, 1), (16, 16)])
def test_what_tcp_carries_from_the_hosts_memory_is_cut_by_its_eager_limit(ranks: int, hosts: int) -> None:
    cut = cut_of(124_439_808, ranks, hosts, Settings().segment_nbytes, on_devices=False)
    assert cut.dense_nbytes == cut.segment_nbytes <= ranks * LARGEST_MESSAGE_NBYTES
    assert not cut.message_nbytes


def test_messages_of_devices_stay_below_tcps_eager_limit_between_hosts() -> None:
    assert cut_of(124_439_808, 2, 2, 8 << 20, on_devices=True).message_nbytes == LARGEST_MESSAGE_NBYTES
    assert not cut_of(124_439_808, 2, 1, 8 << 20, on_devices=True).message_nbytes


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=8), st.integers(1, 16))
def test_pieces_to_each_rank_are_its_messages_in_their_order(messages: list[tuple[int, int]], nbytes: int) -> None:
    whole = [Message(peer, np.full(count, k, np.uint8)) for k, (peer, count) in enumerate(messages)]
    pieces = in_pieces(whole, nbytes)
    assert all(piece.buffer.nbytes <= nbytes for piece in pieces)
    for peer in range(3):
        of = [[m for m in those if m.peer == peer] for those in (whole, pieces)]
        bytes_of = [sorted(b"".join(m.buffer.tobytes() for m in those)) for those in of]
        assert bytes_of[0] == bytes_of[1]
