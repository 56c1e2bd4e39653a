"""The cost model's probe: run by the ranks of a job, it says the same on all of them, or why it cannot."""

from __future__ import annotations

import pytest

from ocomm.predict import probe
from ocomm.session import Session
from tests.cluster.jobs import run_job
from tests.worlds import MPI_SIZE, run_ranks


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_all_ranks_hear_what_the_slowest_saw(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_KERNEL_NUMEL", 1 << 18)
    found = run_ranks(len(hosts), lambda session: probe.measure(200_000), hosts=list(hosts))
    assert found.count(found[0]) == len(found)
    assert (found[0].nodes, found[0].ranks_per_node) == (2, len(hosts) // 2)
    network, codec = found[0].network, found[0].codec
    # What they are is this machine's and this moment's; that they are times and rates is the law.
    for measured in (network.rate, network.message_s, network.node_rate, codec.compress, codec.average, codec.dense):
        assert 0.0 < measured < float("inf")


def test_nodes_of_different_sizes_are_refused() -> None:
    def body(session: Session) -> None:
        with pytest.raises(ValueError, match="--probe needs equally many ranks on every node"):
            probe.measure(1000)

    run_ranks(3, body, hosts=list("aab"))


@pytest.mark.skipif(MPI_SIZE > 0, reason="starts a job of its own")
def test_a_job_of_its_own_prints_what_it_measured_and_what_follows() -> None:
    program = "from ocomm.predict.__main__ import main; raise SystemExit(main())"
    done = run_job(2, program, "--probe", "--parameters", "1e6", "--compute-ms", "10")
    assert done.returncode == 0, done.stderr
    measured, head, *rows, advice = done.stdout.splitlines()
    assert measured.startswith("measured: 1 node(s) of 2 rank(s), ") and "GB/s inside a node" in measured
    assert head.split()[:2] == ["method", "step"] and [row.split()[0] for row in rows] == ["dense", "flat"]
    assert advice.startswith(("do not compress", "use flat"))
