"""The store in which ranks meet that torchrun, or another launcher of Torch's, has started."""

from __future__ import annotations

import sys
import threading

import pytest
import torch.distributed as dist

from ocomm import torch_store
from ocomm.errors import LaunchError
from ocomm.runtime.own_address import free_port


def environment(**more: str) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}


def test_rank_0_hosts_a_store_for_all_ranks() -> None:
    where = environment()
    found: list[dist.Store] = []
    other = threading.Thread(target=lambda: found.append(torch_store.find(where, 1, 2, 60.0)))
    other.start()
    first = torch_store.find(where, 0, 2, 60.0)
    other.join(60.0)
    first.set("key", "value")
    assert found[0].get("key") == b"value"


def test_torchruns_agent_hosts_it_where_it_says_so() -> None:
    where = environment(TORCHELASTIC_USE_AGENT_STORE="True")
    agents = dist.TCPStore("127.0.0.1", int(where["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    torch_store.find(where, 0, 2, 60.0).set("key", "value")
    assert agents.get("key") == b"value"


def test_the_default_groups_store_comes_first() -> None:
    assert torch_store.default_group() is None
    given = dist.HashStore()
    dist.init_process_group("gloo", store=given, rank=0, world_size=1)
    try:
        assert torch_store.default_group() == (0, 1)
        torch_store.find({}, 0, 1, 60.0).set("of ocomm", "value")
        assert torch_store.find({}, 0, 1, 60.0).get("of ocomm") == b"value"
    finally:
        dist.destroy_process_group()


def test_a_store_that_nobody_hosts_is_an_error_after_a_while() -> None:
    with pytest.raises(LaunchError, match=r"rank 1 of 2: no store at MASTER_ADDR=127\.0\.0\.1, .* Has rank 0 come"):
        torch_store.find(environment(), 1, 2, 0.5)


def test_variables_that_are_missing_are_named() -> None:
    with pytest.raises(LaunchError, match="RANK=1 and WORLD_SIZE=2 are set, but not MASTER_PORT: the ranks cannot"):
        torch_store.find({"MASTER_ADDR": "127.0.0.1"}, 1, 2, 60.0)


@pytest.mark.parametrize("port", ["abc", "0", "99999"])
def test_a_port_that_is_none_is_named_at_once(port: str) -> None:
    with pytest.raises(LaunchError, match=f"^MASTER_PORT={port} is no port: set it on all ranks to a free port of ran"):
        torch_store.find(environment() | {"MASTER_PORT": port}, 0, 2, 600.0)


def test_without_torch_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(LaunchError, match=r"cannot be imported here .* Type pip install torch, or start "):
        torch_store.find(environment(), 1, 2, 60.0)
