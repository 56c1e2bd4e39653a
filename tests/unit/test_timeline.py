"""The timeline's file: whole lines, merged files, and disks that do not take it."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocomm.telemetry.__main__ import main
from ocomm.telemetry.timeline import Timeline, merge, path_of, read


def test_every_rank_has_a_file_beside_rank_zeros() -> None:
    assert path_of("/t/trace.json", 0) == Path("/t/trace.json")
    assert path_of("/t/trace.json", 3) == Path("/t/trace.3.json")
    assert path_of("trace", 1) == Path("trace.1")
    assert path_of("/t/trace.json", 0, 2) == Path("/t/trace.start2.json")
    assert path_of("/t/trace.json", 3, 2) == Path("/t/trace.start2.3.json")
    assert path_of("/t/trace.json", 0, 1, 1) == Path("/t/trace.json")
    assert path_of("/t/trace.json", 0, 1, 2) == Path("/t/trace.generation2.json")
    assert path_of("/t/trace.json", 3, 2, 3) == Path("/t/trace.generation3.start2.3.json")


def test_events_of_many_threads_are_in_the_file_and_it_is_json(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 2, "rank 2 on here")

    def work(k: int) -> None:
        for i in range(200):
            timeline.begin(f"tensor {k}", f"B{i}")
            timeline.end(f"tensor {k}", {"i": i})
        timeline.span("other", "S", 1000, 3000, {"bytes": 5})
        timeline.mark("other", "M")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    timeline.close()
    events = json.loads((tmp_path / "t.json").read_text())
    assert events == read(tmp_path / "t.json")
    assert {e["pid"] for e in events} == {2}
    rows = {e["args"]["name"]: e["tid"] for e in events if e["name" if "name" in e else "ph"] == "thread_name"}
    assert set(rows) == {"tensor 0", "tensor 1", "tensor 2", "tensor 3", "other"}
    assert len(set(rows.values())) == 5
    for k in range(4):
        mine = [e for e in events if e["tid"] == rows[f"tensor {k}"] and e["ph"] in "BE"]
        assert [e["ph"] for e in mine] == ["B", "E"] * 200
        assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)
    spans = [e for e in events if e.get("name") == "S"]
    assert [e["dur"] for e in spans] == [2.0] * 4 and spans[0]["args"] == {"bytes": 5}
    now = time.time() * 1e6
    assert all(now - 60e6 < e["ts"] <= now for e in events if e["ph"] in "BE")


def test_lanes_never_overlap() -> None:
    timeline = Timeline(os.devnull, 0, "")
    spans = [(0, 10), (2, 5), (6, 20), (10, 11), (4, 12), (21, 22)]
    lanes: dict[str, list[tuple[int, int]]] = {}
    for span in spans:
        lanes.setdefault(timeline.lane(*span), []).append(span)
    timeline.close()
    assert len(lanes) == 3
    assert all(a[1] <= b[0] for row in lanes.values() for a, b in itertools.pairwise(row))


def test_files_are_merged_and_one_that_was_cut_off_counts_up_to_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        timeline = Timeline(tmp_path / f"{rank}.json", rank, f"rank {rank}")
        timeline.mark("x", "M")
        timeline.close()
    whole = (tmp_path / "1.json").read_text()
    (tmp_path / "1.json").write_text(whole[: whole.index('"M"', whole.index("thread_name")) + 1])
    assert main([str(tmp_path / "all.json"), str(tmp_path / "0.json"), str(tmp_path / "1.json")]) == 0
    events = json.loads((tmp_path / "all.json").read_text())
    assert [e["pid"] for e in events] == [0] * 4 + [1] * 3
    assert capsys.readouterr().out == f"{tmp_path / 'all.json'}: 7 events of 2 files\n"
    assert main([str(tmp_path / "all.json"), str(tmp_path / "none.json")]) == 1
    assert capsys.readouterr().err == f"ocomm.telemetry: {tmp_path / 'none.json'}: No such file or directory\n"
    assert main([]) == 2


def test_a_tensor_has_one_row_in_a_trace_of_several_files_of_a_rank(tmp_path: Path) -> None:
    files = [tmp_path / f"{k}.json" for k in range(2)]
    for file, tracks in zip(files, ["xy", "yx"], strict=True):
        timeline = Timeline(file, 0, "rank 0")
        for track in tracks:
            timeline.mark(track, f"on {track}")
        timeline.close()
    merge(tmp_path / "all.json", files)
    events = read(tmp_path / "all.json")
    tracks_of = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(tracks_of.values()) == ["x", "y"]
    assert all(e["name"] == f"on {tracks_of[e['tid']]}" for e in events if e["ph"] == "X")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file on a disk with 64 KiB left; /dev/full where nothing can be mounted here."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=10).returncode
    except OSError:
        done = 1
    if done:
        yield Path("/dev/full")
        return
    try:
        yield disk / "t.json"
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=10)


def test_a_full_disk_ends_the_timeline_with_one_warning(full_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(full_disk, 0, "rank 0")
    for i in range(5000):
        timeline.mark("x", f"event {i}")
    end = time.monotonic() + 20
    while not timeline.is_over and time.monotonic() < end:
        timeline.mark("x", "more")
    assert timeline.is_over
    timeline.mark("x", "after the end")
    timeline.close()
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.WARNING, f"timeline {full_disk} ends here: No space left on device. Training goes on.")
    ]
    if full_disk.name == "t.json":
        assert len(read(full_disk)) > 100


def test_a_file_that_cannot_be_opened_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(tmp_path / "missing" / "t.json", 0, "rank 0")
    timeline.close()
    assert [r.getMessage() for r in caplog.records] == [
        f"timeline {tmp_path / 'missing' / 't.json'} ends here: No such file or directory. Training goes on."
    ]
