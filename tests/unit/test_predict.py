"""The cost model: its bytes are those of the layout, and it says when not to compress."""

from __future__ import annotations

import pytest

from ocomm.compression.layout import Layout, TensorSpec
from ocomm.predict.__main__ import main
from ocomm.predict.model import GPU, METHODS, CodecTimes, Network, Training, advice, calibrated, compare, predict

BERT = Training(110_000_000, 0.058)
ETHERNET = Network(10e9, node_rate=200e9)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_are_those_of_the_layout_and_of_a_ring(ranks):
    layout = Layout([TensorSpec("x", (40_960_000,))], ranks)
    training = Training(layout.numel, 0.1)
    flat = predict("flat", ranks, 1, training, ETHERNET, CodecTimes())
    assert flat.nbytes == pytest.approx(layout.compressed_bytes(0))
    assert predict("dense", ranks, 1, training, ETHERNET, CodecTimes()).nbytes == pytest.approx(layout.dense_bytes(0))


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_sockets_cost_the_processor_by_the_byte_and_only_between_nodes(ranks_per_node):
    codec = CodecTimes(compress=0, average=0, dense=0, socket=1e-9)
    dense = predict("dense", 2, ranks_per_node, Training(1_000_000, 0.1), ETHERNET, codec)
    assert dense.codec_s == pytest.approx(1e-9 * 2 * 4 * 1_000_000 / ranks_per_node)
    assert predict("dense", 1, ranks_per_node, Training(1_000_000, 0.1), ETHERNET, codec).codec_s == 0


def test_one_rank_waits_for_nobody():
    for method in METHODS:
        alone = predict(method, 1, 1, BERT, ETHERNET, GPU)
        assert (alone.wire_s, alone.message_s, alone.hidden_s) == (0, 0, 0)


def test_a_faster_network_never_makes_a_step_longer():
    for method in METHODS:
        steps = [predict(method, 16, 8, BERT, Network(rate), GPU).step_s for rate in (1e9, 1e10, 1e11, 1e12)]
        assert steps == sorted(steps, reverse=True)


def test_messages_grow_with_the_ranks_only_in_the_flat_form():
    def messages(method: str, nodes: int) -> float:
        return predict(method, nodes, 8, BERT, ETHERNET, GPU).messages

    assert messages("flat", 512) / messages("flat", 8) == pytest.approx(4095 / 63)
    assert messages("hierarchical", 512) < messages("flat", 512) / 7
    assert messages("two-hop", 512) < messages("hierarchical", 512) / 9


def test_advice_is_not_to_compress_inside_a_node_and_two_hops_for_thousands():
    assert advice(compare(1, 8, BERT, ETHERNET, GPU)).startswith("do not compress")
    assert advice(compare(8, 8, BERT, ETHERNET, GPU)).startswith("use hierarchical")
    assert advice(compare(512, 8, BERT, ETHERNET, GPU)).startswith("use two-hop")


def test_a_network_is_calibrated_to_the_dense_step_that_was_measured():
    network = calibrated(ETHERNET, BERT, 8, 8, 1.215, GPU)
    assert 0.4 < network.efficiency < 0.7
    assert predict("dense", 8, 8, BERT, network, GPU).step_s == pytest.approx(1.215, rel=1e-3)
    assert calibrated(ETHERNET, BERT, 8, 8, 0.1, GPU).efficiency == pytest.approx(1.0)


def test_an_unknown_method_is_named():
    with pytest.raises(ValueError, match=r"'ring' is none of dense, flat, hierarchical, two-hop"):
        predict("ring", 2, 1, BERT, ETHERNET, GPU)


def test_the_program_prints_a_line_per_method_and_an_advice(capsys):
    assert main(["--parameters", "110e6", "--compute-ms", "58", "--gpu", "--dense-step-ms", "1215"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["dense", "flat", "hierarchical"]
    assert lines[-1].startswith("use hierarchical: ")
    assert main(["--parameters", "336e6", "--compute-ms", "120", "--table"]) == 0
    assert "4096" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--nodes=-1", "--last=2", "--parameters=0", "--rate=0mbit", "--dense-step-ms=-3"])
def test_what_cannot_be_is_refused(wrong: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--parameters", "1e6", "--compute-ms", "10", wrong])
    assert "error: " in capsys.readouterr().err
