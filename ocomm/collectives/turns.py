"""In which order the ranks of a node make the calls of their bridge: in one, the same on all of them.

A transfer holds its device until all who take part have made the same call, and calls are to be made in one order
everywhere; but segments overtake each other, on each rank in another way. So the first rank of the node gives numbers,
each when all ranks have said that they are ready for the transfer, and they make the calls in that order:

    each rank, when its part is there  --ready-->  the first rank  --number-->  each rank

Nobody waits for ever. What has a number has all ranks ready, and the number is on its way to all of them, so what is
launched is launched by all, once the transfers before it are, of which the same is true. A plan that ends before it is
ready leaves no gap, since it has no number. Only a rank that fails between the two lets others wait: then the bridge is
given up (``collectives.bridge``).
"""

from __future__ import annotations


class Turns:
    """One rank's count; that of the first rank of the node also gives the numbers."""

    def __init__(self) -> None:
        self._given = 0
        self._launched = 0

    def give(self) -> int:
        """The number of the next transfer, for which all ranks are ready. By the first rank alone."""
        self._given += 1
        return self._given - 1

    def is_due(self, number: int) -> bool:
        """Have all transfers before it been launched?"""
        return number == self._launched

    def launch(self, number: int) -> None:
        """It is launched now."""
        assert self.is_due(number), f"transfer {number} out of turn"
        self._launched += 1
