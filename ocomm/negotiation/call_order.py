"""Do all ranks make their calls without a name in the same order? Found out from the lines that call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ocomm.negotiation.request import Kind, Request

#: What a call asks for, and the hash of the lines that ask.
_Call = tuple[object, ...]
_RAGGED = (Kind.ALLGATHER, Kind.ALLTOALL)


class CallOrder:
    """What ranks have asked for under the same automatic name, from different lines.

    Other lines alone are no mistake: rank 0 may call in a branch of its own. But if one rank calls from line A while
    another calls from line B, and at another time the one calls from B while the other calls from A, for tensors of the
    same kind, then their calls come in different orders, and each result is made of two different tensors. The same
    holds for a circle of more lines, as where one rank makes a call more than the others before a loop.
    """

    def __init__(self) -> None:
        # By two ranks: call of the one -> call of the other under the same name -> the first such name.
        self._instead: dict[tuple[int, int], dict[_Call, dict[_Call, str]]] = {}

    def note(self, requests: Sequence[Request | None]) -> None:
        """The requests for one name in rank order, None of a rank that has not asked."""
        for pair, one, other in _different(requests):
            name = requests[pair[0]].name  # type: ignore[union-attr]
            self._instead.setdefault(pair, {}).setdefault(one, {}).setdefault(other, name)

    def crossed(self, requests: Sequence[Request | None]) -> tuple[tuple[int, int], list[str]] | None:
        """Two ranks whose calls came in different orders, as these requests for one name and those noted show, and the
        names of the others that show it; None if there are none."""
        for pair, one, other in _different(requests):
            names = self._way(pair, other, one)
            if names:
                return pair, names
        return None

    def _way(self, pair: tuple[int, int], start: _Call, end: _Call) -> list[str]:
        """The names by which one comes from ``start`` to ``end``; none if there is no way."""
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
    """The first rank that has asked and each one that called from elsewhere, with their calls."""
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
