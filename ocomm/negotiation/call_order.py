"""Detects ranks that make their calls without a name in different orders, from the lines that call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ocomm.negotiation.request import Kind, Request

#: What a call asks for, and the hash of the lines that make it.
_Call = tuple[object, ...]
_RAGGED = (Kind.ALLGATHER, Kind.ALLTOALL)


class CallOrder:
    """Remembers what ranks have asked for under the same automatic name, from different lines.

    Different lines alone are no mistake: rank 0 may make its call in a branch of its own. But suppose that one rank
    calls from line A while another calls from line B, and at another time the one calls from B while the other calls
    from A, for tensors of the same kind. Then their calls come in different orders, and each result is made of two
    different tensors. The same holds for a cycle of more lines, as when one rank makes one more call than the others
    before a loop.
    """

    def __init__(self) -> None:
        # For two ranks: call of the one -> call of the other under the same name -> the first such name.
        self._instead: dict[tuple[int, int], dict[_Call, dict[_Call, str]]] = {}

    def note(self, requests: Sequence[Request | None]) -> None:
        """Notes the requests for one name in rank order, None for a rank that has not asked."""
        for pair, one, other in _different(requests):
            name = requests[pair[0]].name  # type: ignore[union-attr]
            self._instead.setdefault(pair, {}).setdefault(one, {}).setdefault(other, name)

    def crossed(self, requests: Sequence[Request | None]) -> tuple[tuple[int, int], list[str]] | None:
        """Returns two ranks whose calls came in different orders, and the names of the earlier requests that show it,
        if these requests for one name do; else None.
        """
        for pair, one, other in _different(requests):
            names = self._way(pair, other, one)
            if names:
                return pair, names
        return None

    def _way(self, pair: tuple[int, int], start: _Call, end: _Call) -> list[str]:
        """Returns the names that lead from ``start`` to ``end``; none if there is no way."""
        instead = self._instead.get(pair, {})
        names: dict[_Call, list[str]] = {start: []}
        waiting = [start]
        while waiting:
            call = waiting.pop(0)
            for following, name in instead.get(call, {}).items():
                if following == end:
                    return [*names[call], name]
                if following not in names:
                    names[following] = [*names[call], name]
                    waiting.append(following)
        return []


def _different(requests: Sequence[Request | None]) -> Iterator[tuple[tuple[int, int], _Call, _Call]]:
    """Yields the first rank that has asked and each rank that called from elsewhere, with their calls."""
    first = None
    for rank, request in enumerate(requests):
        if request is None:
            continue
        if not request.is_automatic:
            return
        if first is None:
            first, asked = rank, request
        elif request.digest != asked.digest:
            yield (first, rank), _call(asked), _call(request)


def _call(request: Request) -> _Call:
    shape = request.shape[1:] if request.kind in _RAGGED else request.shape
    return request.digest, request.dtype, shape, request.op, request.root, request.prescale, request.postscale
