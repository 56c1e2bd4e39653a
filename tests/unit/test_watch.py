"""What is shown of a watched job, from counters alone."""

from __future__ import annotations

import io
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest

from ocomm.launch.watch import LiveView, PlainView, Progress, Row, cells, stall_lines, summary
from ocomm.runtime.exporter import Exporter
from ocomm.telemetry import metrics_port
from ocomm.telemetry.counters import (
    OPTIMIZER,
    RANK,
    SIZE,
    JobCounters,
    OptimizerCounters,
    RankCounters,
    Stalled,
    Waiting,
    parse_address,
    prometheus,
    read_job,
    spelled,
)
from ocomm.telemetry.metrics_port import MetricsPort

PAGE = Path(__file__).resolve().parents[2] / "docs" / "watching.md"
ADAM = "DistributedOneBitAdam"


def optimizer(steps: int, waited_s: float | None = 0.0, dense: int = 100) -> OptimizerCounters:
    """An optimizer after so many steps, of which the first ``dense`` were dense; a dense step sends 1000 bytes."""
    compressed = max(steps - dense, 0)
    sent = 1000 * min(steps, dense) + 40 * compressed
    return OptimizerCounters(
        ADAM, steps, steps - compressed, compressed, bytes_sent=sent, bytes_dense=1000 * steps, waited_s=waited_s
    )


def job(at_s: float, *ranks: RankCounters, size: int | None = None) -> JobCounters:
    return JobCounters(at_s, size or len(ranks), ranks)


def shown(*jobs: JobCounters) -> list[Row]:
    """The rows of the last of these jobs, which came one after the other."""
    progress = Progress()
    return [progress.rows(each) for each in jobs][-1]


def test_a_row_has_the_pace_and_the_stage_since_the_sample_before() -> None:
    first = job(10.0, RankCounters(0, "a", (optimizer(90),)), RankCounters(1, "b", (optimizer(90),)))
    # Rank 1 was heard half a second before.
    second = job(
        12.0, RankCounters(0, "a", (optimizer(150, 0.5),)), RankCounters(1, "b", (optimizer(135, 0.75),), silent_s=0.5)
    )
    third = job(
        14.0, RankCounters(0, "a", (optimizer(250, 1.5),)), RankCounters(1, "b", (optimizer(135, 0.75),), silent_s=2.5)
    )
    zero, one = shown(first, second)
    assert (zero.steps, zero.per_second, zero.stage, zero.waited) == (150, 30.0, "dense, compressed", 0.25)
    assert (one.steps, one.per_second, one.waited) == (135, 30.0, 0.5)
    zero, one = shown(first, second, third)
    assert (zero.per_second, zero.stage, one.per_second, one.stage) == (50.0, "compressed", 30.0, "dense, compressed")
    assert summary(third, [zero, one]) == (
        "2 ranks, step 250, 50 steps/s, compressed, sent 207 kB instead of 385 kB, 1.86 times fewer"
    )
    assert cells(zero) == ("0", "a", ADAM, "250", "50", "106 kB", "2.36x", "compressed", "50%", "")


def test_the_first_sample_says_what_was_sent_so_far_and_a_restart_begins_anew() -> None:
    (row,) = shown(job(3.0, RankCounters(0, "a", (optimizer(7),))))
    assert (row.per_second, row.waited, row.stage) == (None, None, "dense")
    assert cells(row)[4:8] == ("", "7 kB", "1x", "dense")
    (row,) = shown(*(job(at, RankCounters(0, "a", (optimizer(n),))) for at, n in ((1.0, 50), (3.0, 300), (9.0, 2))))
    assert (row.steps, row.per_second) == (2, None)


def test_the_slowest_rank_is_the_one_that_waits_least_by_far() -> None:
    def troubles(*waited_s: float) -> list[str]:
        before = job(0.0, *(RankCounters(rank, "a", (optimizer(5),)) for rank in range(len(waited_s))))
        after = job(10.0, *(RankCounters(rank, "a", (optimizer(9, s),)) for rank, s in enumerate(waited_s)))
        return [row.trouble for row in shown(before, after)]

    assert troubles(4.0, 4.1, 0.5, 3.9) == ["", "", "slowest", ""]
    assert troubles(1.0, 1.1, 0.5) == ["", "", ""]
    assert troubles(2.0) == [""]


def test_trouble_is_named_with_its_ranks() -> None:
    step = Waiting(f"{ADAM}: step 8", (1,))
    now = job(
        20.0,
        RankCounters(0, "a", (optimizer(7),), (step,), (Stalled("metric", 5.2, (1,)), Stalled("loss", 9.0, (1, 3)))),
        RankCounters(1, "b", (optimizer(7),)),
        RankCounters(2, "b", (), (step,), silent_s=9.0),
        size=4,
    )
    rows = shown(now)
    assert [row.trouble for row in rows] == ["waits for rank 1", "ranks 0, 2 wait for it", "silent for 9 s"]
    assert stall_lines(now) == [
        "tensor 'loss' has waited 9 s for ranks 1, 3",
        "tensor 'metric' has waited 5 s for rank 1",
    ]
    assert summary(now, rows) == (
        "3 of 4 ranks heard, step 7, dense, sent 14 kB; rank 0 on a: waits for rank 1; rank 1 on b: ranks 0, 2 wait "
        "for it; rank 2 on b: silent for 9 s; tensor 'loss' has waited 9 s for ranks 1, 3"
    )


def test_counters_travel_as_json() -> None:
    told = job(
        1.5,
        RankCounters(0, "a", (optimizer(7), OptimizerCounters("other", waited_s=None)), (Waiting("step", (1, 2)),)),
        RankCounters(1, "b", stalls=(Stalled("x", 3.0, (0,)),), silent_s=0.25),
        size=3,
    )
    assert read_job(json.loads(json.dumps(spelled(told)))) == told


def test_prometheus_gets_each_number_once_with_its_labels() -> None:
    text = prometheus(
        job(
            1.0,
            RankCounters(0, 'a"\\', (optimizer(120, 1.25),), (Waiting("step", (1,)),), (Stalled("x", 3.0, (1,)),)),
            RankCounters(1, "b", (OptimizerCounters("dense", 3, bytes_sent=1000.5),), silent_s=2.0),
        )
    )
    lines = text.splitlines()
    assert text.endswith("\n") and "ocomm_ranks 2" in lines
    assert 'ocomm_rank_missed_by{rank="0",host="a\\"\\\\"} 0' in lines
    assert {'ocomm_rank_missed_by{rank="1",host="b"} 1', 'ocomm_rank_stalled_tensors{rank="1",host="b"} 1'} <= set(
        lines
    )
    assert 'ocomm_rank_silent_seconds{rank="1",host="b"} 2' in lines
    assert 'ocomm_sent_bytes_total{rank="1",host="b",optimizer="dense"} 1000.500000' in lines
    assert 'ocomm_compressed_steps_total{rank="1",host="b",optimizer="dense"} 0' in lines
    # An optimizer that does not measure it has no sample.
    assert [line for line in lines if line.startswith("ocomm_waited_seconds_total")] == [
        'ocomm_waited_seconds_total{rank="0",host="a\\"\\\\",optimizer="DistributedOneBitAdam"} 1.250000'
    ]
    names = [metric.name for metric in (SIZE, *RANK.values(), *OPTIMIZER.values())]
    assert [line.split()[2] for line in lines if line.startswith("# TYPE")] == names
    assert all(name.endswith("_total") == metric.is_counter for metric in OPTIMIZER.values() for name in [metric.name])


def test_every_counter_is_declared_and_on_the_page() -> None:
    assert ["name", *OPTIMIZER] == [field.name for field in fields(OptimizerCounters)]
    rows = re.findall(r"^\| `(ocomm_\w+)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(metric.name, metric.meaning) for metric in (SIZE, *RANK.values(), *OPTIMIZER.values())]


def test_without_a_terminal_there_is_a_line_every_ten_seconds_and_one_at_the_end() -> None:
    clock, stream = [100.0], io.TextIOWrapper(io.BytesIO())
    view = PlainView(stream, lambda: clock[0])
    for now_s in (101.0, 109.0, 111.0, 113.0, 115.0):
        clock[0] = now_s
        view.show(job(now_s, RankCounters(0, "a", (optimizer(int(now_s)),))))
    view.close()
    view.close()
    stream.seek(0)
    written = stream.read()
    assert [re.findall(r"step (\d+)", line) for line in written.splitlines()] == [["111"], ["115"]]


def test_on_a_terminal_the_table_is_below_what_the_ranks_write() -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    view = LiveView(stream)
    view.write(b"epoch 1\nhalf a ")
    view.show(job(1.0, *(RankCounters(rank, "a", (optimizer(5),)) for rank in range(30))))
    view.write(b"line [bold]\n10%\r20%\r\n")
    view.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "epoch 1\n" in text and "half a line [bold]\n" in text and "20%\n" in text and "10%" not in text
    assert "30 ranks, step 5, dense, sent 150 kB" in " ".join(text.split())
    assert "and 6 more" in " ".join(text.split())


# The port


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9100", ("127.0.0.1", 9100)),
        ("0", ("127.0.0.1", 0)),
        ("10.0.0.5:80", ("10.0.0.5", 80)),
        ("[::1]:7", ("::1", 7)),
    ],
)
def test_an_address_has_a_port_and_is_on_loopback_by_default(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "http", "70000", "a:b", "-1"])
def test_another_text_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="expected a port"):
        parse_address(text)


def test_the_port_has_one_page_and_outlives_bad_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_port, "_CLIENT_S", 0.2)
    port = MetricsPort("127.0.0.1", 0, lambda: "ocomm_ranks 2\n")
    url = f"http://127.0.0.1:{port.port}"
    try:
        for request in (b"", b"GET", b"\x00" * 9000, b"POST /metrics HTTP/1.0\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port.port), 20.0) as client:
                client.sendall(request)
                while client.recv(4096):  # until it is disconnected
                    pass
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            assert answer.read() == b"ocomm_ranks 2\n"
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/etc/passwd", timeout=20)
        caught.value.close()
        assert caught.value.code == 404
    finally:
        port.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port.port), 1.0).close()


def test_a_port_in_use_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        exporter = Exporter(0, 1, lambda: RankCounters(0, "a"), lambda: 0.0)
        exporter.open(("127.0.0.1", taken.getsockname()[1]), None)
        exporter.close()
    (record,) = caplog.records
    assert "Training goes on without it; choose another port." in record.getMessage()


def test_rank_0_hands_on_what_it_has_heard_and_how_long_ago() -> None:
    clock = [5.0]
    others = Exporter(1, 3, lambda: RankCounters(1, "b", waits=(Waiting("w" * 999, (0,)),) * 9), lambda: clock[0])
    first = Exporter(0, 3, lambda: RankCounters(0, "a"), lambda: clock[0])
    told: list[JobCounters] = []
    first.open(None, told.append)
    first.hear(1, others.sample())
    clock[0] = 7.5
    assert first.sample() == b""
    first.close()
    assert told[-1] == first.job()
    heard = {rank.rank: rank.silent_s for rank in told[-1].ranks}
    assert (heard, told[-1].size) == ({0: 0.0, 1: 2.5}, 3)
    (limited,) = {(len(rank.waits), len(rank.waits[0].what)) for rank in told[-1].ranks if rank.waits}
    assert limited == (8, 200)


def test_what_comes_while_ocommrun_takes_counters_is_handed_on_at_the_end() -> None:
    clock = [1.0]
    exporter = Exporter(0, 1, lambda: RankCounters(0, "a"), lambda: clock[0])
    told: list[float] = []
    has_begun, may_end = threading.Event(), threading.Event()

    def tell(job: JobCounters) -> None:
        told.append(job.at_s)
        has_begun.set()
        may_end.wait(20.0)

    exporter.open(None, tell)
    exporter.sample()
    assert has_begun.wait(20.0)
    clock[0] = 2.0
    exporter.sample()
    closing = threading.Thread(target=exporter.close)
    closing.start()
    while not exporter._closing:
        time.sleep(0.01)
    may_end.set()
    closing.join(20.0)
    assert told == [1.0, 2.0]
