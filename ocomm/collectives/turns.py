"""The order in which the ranks of a node make the calls of their bridge, which is the same on all of them.

A transfer occupies its device until all ranks that take part have made the same call, and calls must be made in one
order on all ranks; but segments overtake each other, differently on each rank. So the first rank of the node numbers
the transfers, each one when all ranks have said that they are ready for it, and ranks make the calls in the order of
numbers:

    each rank, when its part is there  --ready-->  the first rank  --number-->  each rank

No rank waits for ever. All ranks are ready for a transfer that has a number, and the number is on its way to all of
them. So if one rank launches a transfer, all do, once they have launched the transfers before it, of which the same is
true. A plan that ends before it is ready leaves no gap, since it has no number. Only a rank that fails between ready
and number lets others wait, and then the bridge is ended (``collectives.bridge``).
"""

from __future__ import annotations


class Turns:
    """One rank's count of launched transfers. On the first rank of the node it also gives the numbers."""

    def __init__(self) -> None:
        self._given = 0
        self._launched = 0

    def give(self) -> int:
        """Returns the number of the next transfer, for which all ranks are ready. Called on the first rank of the node
        only.
        """
        self._given += 1
        return self._given - 1

    def is_due(self, number: int) -> bool:
        """Returns True if all transfers before it have been launched."""
        return number == self._launched

    def launch(self, number: int) -> None:
        """Notes that transfer ``number`` is launched."""
        assert self.is_due(number), f"transfer {number} out of turn"
        self._launched += 1
