"""Lets each allocation of an engine fail once, and prints what came of it. Runs with ``allocations.so`` preloaded."""

from __future__ import annotations

import numpy as np

from ocomm.collectives.native_engine import NativeEngine
from ocomm.collectives.outcome import explain
from ocomm.collectives.plan import Message, Plan, Stage
from ocomm.kernels.cpu import Pool
from ocomm.transport.local import Fabric
from tests.callback_mpi import CallbackMpi
from tests.faults.allocations import Allocations

#: More than an engine first has room for.
_MESSAGES = 200


def use() -> str:
    """Makes threads, an engine and a channel, and posts many messages. Returns how that ended."""
    mpi, transport = CallbackMpi(), Fabric(2).endpoint(0)
    mpi.attach(transport)
    pool = None
    try:
        pool = Pool(2)
        engine = NativeEngine(mpi, pool=pool)
        engine.watch(transport)
        channel = engine.open_channel(transport, 1)
        stage = Stage([], [], [Message(1, np.empty(1, np.uint8)) for _ in range(_MESSAGES)])
        ticket = channel.submit(channel.prepare(Plan("messages", [[stage]])), 0.0, False)
        engine.run(0.01)
        said = str(explain(ticket, channel, (0, 1), "messages", 1.0)) if ticket.state else "not begun"
        engine.fail()
        engine.run(0.0)
        return said if ticket.error else "everything"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if pool is not None:
            pool.close()


def main() -> None:
    """Prints a line for each call of each site."""
    allocations = Allocations()
    allocations.begin()
    print("no fault:", use())
    for allocation, count in allocations.counts().items():
        for number in range(1, count + 1):
            allocations.begin((allocation, number, False))
            said = use()
            print(f"{allocation.name.split(' (')[0]}, {number} of {count}: {said}" if allocations.has_failed else "?")


if __name__ == "__main__":
    main()
