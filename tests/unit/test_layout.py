"""The layout of compressed tensors: laws over arbitrary tensors, ranks, block sizes and buckets."""

from __future__ import annotations

import cProfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ocomm.compression.codecs import BFLOAT16, INT4, INT8, SCALED_SIGNS, SIGNS
from ocomm.compression.layout import Layout, TensorSpec
from ocomm.compression.wire import HEADER, header_nbytes
from ocomm.types import Nodes

# A busy machine is no reason to fail.
law = settings(deadline=None, max_examples=60)

numels = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3000)), min_size=1, max_size=12)
block_sizes = st.sampled_from([16, 64, 1024, 4096, "tensor"])


def make(sizes, ranks=1, block_size=4096, nodes=None):
    return Layout([TensorSpec(f"t{k}", (n,)) for k, n in enumerate(sizes)], ranks, block_size, nodes)


@st.composite
def layouts(draw):
    """Flat ones, and ones over nodes of any sizes, whose ranks lie mixed, in one group or more."""
    ranks = draw(st.integers(1, 6))
    nodes = None
    if draw(st.booleans()):
        members = Nodes.of_hosts(draw(st.lists(st.sampled_from("abcd"), min_size=ranks, max_size=ranks))).members
        nodes = Nodes(members, draw(st.integers(1, len(members))))
    return make(draw(numels), ranks, draw(block_sizes), nodes)


@st.composite
def bucketed(draw):
    """A layout, one of its ranks, some of its tensors in some order, and a segment size."""
    layout = draw(layouts())
    order = draw(st.permutations(range(len(layout.tensors))))
    count = draw(st.integers(0, len(order)))
    return layout, draw(st.integers(0, layout.ranks - 1)), list(order[:count]), draw(st.integers(1, 800))


codecs = st.sampled_from([SIGNS, SCALED_SIGNS, BFLOAT16, INT8, INT4])


@law
@given(layouts())
def test_blocks_tile_each_tensor_and_never_cross_one(layout):
    seen = 0
    for index, spec in enumerate(layout.tensors):
        blocks = layout.tensor_blocks(index)
        assert (blocks["tensor"] == index).all()
        ends = blocks["start"] + blocks["length"]
        assert blocks["start"].tolist() == [0, *ends.tolist()][: blocks.size]
        assert (blocks["length"] > 0).all()
        assert (ends[-1] if blocks.size else 0) == spec.numel
        assert (blocks["offset"] == layout.offsets[index] + blocks["start"]).all()
        seen += blocks.size
    assert seen == layout.blocks.size


@law
@given(layouts())
def test_flat_offsets_are_aligned_and_tensors_do_not_overlap(layout):
    assert (layout.blocks["offset"] % 16 == 0).all()
    ends = layout.offsets + layout.numels
    assert (ends[:-1] <= layout.offsets[1:]).all()
    assert ends[-1] <= layout.flat_numel < ends[-1] + 16


@law
@given(bucketed())
def test_the_index_counts_real_elements_in_registration_order_whatever_the_buckets(case):
    layout, rank, tensors, nbytes = case
    before = [0, *np.cumsum(layout.numels).tolist()]
    for blocks in (layout.blocks, *(segment.blocks for segment in layout.segments(tensors, rank, nbytes))):
        for block in blocks:
            assert block["index"] == before[block["tensor"]] + block["start"]


@law
@given(layouts())
def test_the_owner_is_the_least_loaded_worker_in_registration_order(layout):
    workers = [rank for node in layout.nodes.members for rank in node[: layout.nodes.slices]]
    load = [0] * len(workers)
    for block in layout.blocks:
        least = load.index(min(load))
        assert block["owner"] == workers[least]
        assert block["slice"] == layout.slice_of(workers[least])
        load[least] += int(block["length"])


@law
@given(layouts())
def test_the_blocks_of_a_slice_fill_its_workers_buffers_without_overlap(layout):
    for rank in range(layout.ranks):
        mine = layout.blocks[layout.blocks["slice"] == layout.slice_of(rank)]
        assert (mine["local"] % 16 == 0).all()
        ends = mine["local"] + mine["length"]
        assert (ends[:-1] <= mine["local"][1:]).all()
        assert layout.worker_numel(rank) == sum((int(n) + 15) // 16 * 16 for n in mine["length"])
    if layout.nodes.is_flat:
        assert (layout.blocks["local"] == layout.blocks["offset"]).all()
        assert layout.worker_numel(0) == layout.flat_numel


@law
@given(layouts())
def test_owned_blocks_fill_their_owner_buffer_without_overlap(layout):
    for rank in range(layout.ranks):
        mine = layout.blocks[layout.blocks["owner"] == rank]
        assert (mine["owned"] % 16 == 0).all()
        ends = mine["owned"] + mine["length"]
        assert (ends[:-1] <= mine["owned"][1:]).all()
        if mine.size:
            assert ends[-1] <= layout.owned_numel(rank)
        assert layout.owned_numel(rank) == sum((int(n) + 15) // 16 * 16 for n in mine["length"])


@pytest.mark.parametrize("hosts", ["ab", "abc", "abcdefgh", "aabb", "aaabbb", "abababab"])
def test_the_busiest_owner_is_within_five_percent_of_the_mean_for_many_blocks(hosts):
    rng = np.random.default_rng(len(hosts))
    layout = make(rng.integers(1, 200_000, 60).tolist(), len(hosts), nodes=Nodes.of_hosts(hosts))
    load = np.bincount(layout.blocks["owner"], weights=layout.blocks["length"], minlength=layout.ranks)
    assert load.max() <= 1.05 * load.mean()
    for first in (0, 20, 40):
        for segment in layout.segments(range(first, first + 20), 0, 1 << 30):
            assert max(segment.message_nbytes) <= 1.05 * np.mean(segment.message_nbytes)


def test_ranks_beyond_the_slices_own_nothing_and_compress_nothing():
    layout = make([40_000, 7], 4, nodes=Nodes(((0, 1, 2), (3,))))
    assert [layout.slice_of(rank) for rank in range(4)] == [0, -1, -1, 0]
    assert [layout.worker_numel(rank) > 0 for rank in range(4)] == [True, False, False, True]
    assert [layout.owned_numel(rank) > 0 for rank in range(4)] == [True, False, False, True]
    (segment,) = layout.segments([0, 1], 1, 1 << 20)
    assert (segment.worker_blocks.size, segment.owned_blocks.size, segment.workers) == (0, 0, ())


@law
@given(bucketed())
def test_segments_cover_each_block_once_in_bucket_order(case):
    layout, rank, tensors, nbytes = case
    segments = layout.segments(tensors, rank, nbytes)
    want = [(t, b["start"], b["length"], b["offset"]) for t in tensors for b in layout.tensor_blocks(t)]
    got = [(b["tensor"], b["start"], b["length"], b["offset"]) for s in segments for b in s.blocks]
    assert got == want
    for segment in segments:
        assert segment.tensors == tuple(dict.fromkeys(segment.blocks["tensor"].tolist()))
        payload = SCALED_SIGNS.payload_nbytes(segment.blocks["length"])
        assert payload.sum() <= nbytes + payload.max()


@law
@given(bucketed(), codecs)
def test_every_byte_of_a_message_has_one_use(case, codec):
    layout, rank, tensors, nbytes = case
    for segment in layout.segments(tensors, rank, nbytes, codec):
        assert len(segment.message_start) == len(segment.message_nbytes) == layout.ranks
        use = np.zeros(segment.packed_nbytes, int)
        owner_of = {int(b["offset"]): int(b["owner"]) for b in layout.blocks}
        for worker, start, size in zip(range(layout.ranks), segment.message_start, segment.message_nbytes, strict=True):
            assert start % 8 == size % 8 == 0
            if layout.slice_of(worker) < 0:
                assert size == 0
                continue
            use[start : start + segment.header_nbytes] += 1
            first, last = segment.slice_bounds[layout.slice_of(worker) :][:2]
            assert first <= start and start + size <= last
        for block in segment.blocks:
            owner = owner_of[int(block["offset"])]
            length = int(block["length"])
            places = [(int(block["bits"]), (length * codec.bits + 7) // 8)]
            assert codec.bits < 16 or block["bits"] % 2 == 0
            if codec.group is not None:
                assert block["scale"] % 4 == 0
                places.append((int(block["scale"]), 4 * -(-length // codec.group)))
            else:
                assert block["scale"] == -1
            for at, count in places:
                assert segment.message_start[owner] <= at
                assert at + count <= segment.message_start[owner] + segment.message_nbytes[owner]
                use[at : at + count] += 1
        assert use.max() == 1
        padding = [
            use[start : start + size] for start, size in zip(segment.message_start, segment.message_nbytes, strict=True)
        ]
        for message in padding:
            unused = np.flatnonzero(message == 0)
            assert unused.size < 8
            assert (unused == np.arange(message.size - unused.size, message.size)).all()


@law
@given(bucketed())
def test_an_element_keeps_its_owner_and_its_place_there_whatever_the_buckets(case):
    layout, rank, tensors, nbytes = case
    fixed = {
        int(b["offset"]): (
            int(b["owned"]) if b["owner"] == rank else -1,
            int(b["local"]) if b["slice"] == layout.slice_of(rank) else -1,
        )
        for b in layout.blocks
    }
    for segment in layout.segments(tensors, rank, nbytes):
        for block in segment.blocks:
            assert fixed[int(block["offset"])] == (block["owned"], block["local"])
        assert (segment.owned_blocks == segment.blocks[segment.blocks["owned"] >= 0]).all()
        assert (segment.worker_blocks == segment.blocks[segment.blocks["local"] >= 0]).all()


@law
@given(layouts())
def test_the_parts_of_a_tensor_which_its_workers_hold_make_up_the_whole(layout):
    rng = np.random.default_rng(layout.numel)
    for tensor, numel in enumerate(layout.numels.tolist()):
        whole = rng.random(numel).astype(np.float32) + 1
        for node in layout.nodes.members:
            put_together = np.zeros_like(whole)
            for rank in node:
                buffer = np.full(layout.worker_numel(rank), np.nan, np.float32)
                part = layout.to_worker(tensor, rank, whole)
                buffer[layout.local_span(tensor, rank)] = part
                assert part.size == layout.local_span(tensor, rank).stop - layout.local_span(tensor, rank).start
                put_together += layout.from_worker(tensor, rank, buffer)
            assert (put_together == whole).all()


@law
@given(bucketed())
def test_runs_are_the_elements_of_each_slice_in_the_order_of_its_blocks(case):
    layout, rank, tensors, nbytes = case
    for segment in layout.segments(tensors, rank, nbytes):
        for number, runs in enumerate(segment.slice_runs):
            blocks = segment.blocks[segment.block_slices == number]
            want = [(b["tensor"], b["start"] + e) for b in blocks for e in range(b["length"])]
            got = [(r["tensor"], r["start"] + e) for r in runs for e in range(r["length"])]
            assert got == want
            assert [r["position"] for r in runs] == (np.cumsum(runs["length"]) - runs["length"]).tolist()
            same = (np.diff(runs["tensor"]) == 0) & ((runs["start"] + runs["length"])[:-1] == runs["start"][1:])
            assert not same.any(), "neighbours are one run"


@law
@given(bucketed())
def test_all_ranks_see_the_same_geometry(case):
    layout, rank, tensors, nbytes = case
    for mine, other in zip(
        layout.segments(tensors, rank, nbytes), layout.segments(tensors, layout.ranks - 1, nbytes), strict=True
    ):
        assert mine.message_start == other.message_start
        assert mine.digest == other.digest
        for field in ("offset", "start", "bits", "scale", "index", "length", "tensor"):
            assert (mine.blocks[field] == other.blocks[field]).all()


@pytest.mark.parametrize(
    ("codec", "share"),
    [(SCALED_SIGNS, 31.75), (SIGNS, 32), (BFLOAT16, 2), (INT8, 128 / 33), (INT4, 128 / 17)],
    ids=lambda codec: getattr(codec, "label", ""),
)
def test_the_default_block_size_sends_this_part_of_dense(codec, share):
    layout = make([4096 * 100], 4)
    assert layout.dense_bytes(0) / layout.compressed_bytes(0, codec) == pytest.approx(share, abs=0.01)


@law
@given(layouts(), st.data())
def test_presence_bits_come_back(layout, data):
    tensors = [t for t in range(len(layout.tensors)) if layout.numels[t]]
    present = np.array(data.draw(st.lists(st.booleans(), min_size=len(layout.tensors), max_size=len(layout.tensors))))
    seen = np.zeros(len(layout.tensors), bool)
    for segment in layout.segments(tensors[::-1], 0, 300):
        bits = segment.presence_bits(present)
        assert bits.size == segment.header_nbytes - HEADER.itemsize
        segment.read_presence(bits, seen)
    assert (seen[tensors] == present[tensors]).all()


def test_an_owner_without_a_block_still_has_a_message():
    (segment,) = make([10], 3).segments([0], 2, 1000)
    assert segment.message_nbytes[1:] == (header_nbytes(1),) * 2
    assert segment.owned_blocks.size == 0


@law
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 5))
def test_buckets_have_no_more_than_their_share_and_a_tensor(numels, count):
    layout = Layout([TensorSpec(str(number), (numel,)) for number, numel in enumerate(numels)], 1)
    order = list(range(len(numels)))[::-1]
    buckets = layout.buckets(order, count)
    assert len(buckets) <= count and all(buckets) and [tensor for bucket in buckets for tensor in bucket] == order
    for bucket in buckets:
        assert sum(numels[tensor] for tensor in bucket) <= sum(numels) / count + max(numels)


def test_tensors_without_elements_travel_in_no_segment():
    layout = make([0, 5, 0], 2)
    (segment,) = layout.segments([2, 1, 0], 0, 1000)
    assert segment.tensors == (1,)
    assert layout.segments([0, 2], 0, 1000) == []
    assert layout.segments([], 0, 1000) == []


def test_a_scalar_is_one_element():
    assert TensorSpec("s", ()).numel == 1


def test_the_digest_names_everything_that_must_agree():
    spec = TensorSpec("w", (2, 3))
    variants = [
        Layout([spec], 2),
        Layout([spec], 3),
        Layout([spec], 2, 64),
        Layout([spec], 2, "tensor"),
        Layout([TensorSpec("v", (2, 3))], 2),
        Layout([TensorSpec("w", (3, 2))], 2),
        Layout([TensorSpec("w", (2, 3), order="tf")], 2),
        Layout([TensorSpec("w", (2, 3), dtype="bfloat16")], 2),
        Layout([spec, TensorSpec("b", (3,))], 2),
        Layout([TensorSpec("b", (3,)), spec], 2),
        Layout([spec], 4),
        Layout([spec], 4, nodes=Nodes(((0, 1), (2, 3)))),
        Layout([spec], 4, nodes=Nodes(((0, 2), (1, 3)))),
        Layout([spec], 4, nodes=Nodes(((0, 1), (2, 3)), 2)),
    ]
    assert len({layout.digest for layout in variants}) == len(variants)
    assert Layout([spec], 2).digest == Layout([spec], 2, nodes=Nodes.flat(2)).digest == variants[0].digest
    assert 0 <= variants[0].digest < 1 << 64


def test_a_signature_names_the_segment_and_the_compressor():
    layout = make([100, 200], 2, 16)
    segments = layout.segments([0, 1], 0, 20) + layout.segments([0, 1], 0, 1000)
    segments += layout.segments([0, 1], 0, 1000, SIGNS)
    signatures = {segment.signature(name) for segment in segments for name in ("onebit-l1", "onebit-rms")}
    assert len(signatures) == 2 * len(segments)


@pytest.mark.parametrize("block_size", [0, -16, 100, 8])
def test_a_block_size_that_breaks_the_alignment_is_an_error(block_size):
    with pytest.raises(ValueError, match="block_size"):
        make([10], 1, block_size)


def test_wrong_arguments_are_errors():
    with pytest.raises(ValueError, match="'t'"):
        Layout([TensorSpec("t", (1,)), TensorSpec("t", (2,))], 1)
    with pytest.raises(ValueError, match="rank"):
        make([1], 0)
    with pytest.raises(ValueError, match="nodes of 2"):
        make([1], 3, nodes=Nodes.flat(2))
    with pytest.raises(ValueError, match="twice"):
        make([1, 2]).segments([0, 1, 0], 0, 100)
    with pytest.raises(ValueError, match="segment_nbytes"):
        make([1]).segments([0], 0, 0)
    with pytest.raises(ValueError, match="2\\^31"):
        make([1 << 31], 1, "tensor")


def test_tables_are_read_only():
    layout = make([100])
    (segment,) = layout.segments([0], 0, 1000)
    for table in (layout.blocks, segment.blocks, segment.owned_blocks):
        with pytest.raises(ValueError, match="read-only"):
            table["length"] = 0


def test_the_work_for_a_tensor_does_not_grow_with_their_number():
    def calls(tensors: int) -> int:
        profile = cProfile.Profile()
        with profile:
            make([12_500] * tensors, 8).segments(range(tensors), 0, 1 << 20)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(2000) < 2.5 * calls(1000)
    assert calls(2000) < 40 * 2000
