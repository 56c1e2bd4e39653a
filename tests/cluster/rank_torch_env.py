"""A rank that writes which of torchrun's variables it has: FILE, before and after init()."""

from __future__ import annotations

import json
import os
import sys

from ocomm.torch_variables import MASTER, OF_LAUNCHERS

before = {name: os.environ.get(name) for name in (*OF_LAUNCHERS, *MASTER)}

import ocomm  # noqa: E402

if "--accelerate" in sys.argv:  # as it is where a script has made an Accelerator first
    from types import ModuleType

    sys.modules["accelerate.state"] = state = ModuleType("accelerate.state")
    state.PartialState = type("PartialState", (), {"_shared_state": {"num_processes": 1}})  # type: ignore[attr-defined]

ocomm.init()
after = {name: os.environ.get(name) for name in (*OF_LAUNCHERS, *MASTER)}
with open(f"{sys.argv[1]}.{ocomm.rank()}", "w") as file:
    json.dump([before, after], file)
