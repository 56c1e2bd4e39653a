"""Chooses the segments of an exchange and how many are in flight, so that computing, sending and gathering overlap."""

from __future__ import annotations

from typing import NamedTuple

#: Segments of an exchange: while one is averaged and gathered, the next are on their way.
SEGMENTS = 16
#: Segments in flight. A segment takes as long as two messages, so on a link with a delay few in flight leave the wire
#: idle: at 160 Mbit/s and 100 ms one way, averages of 13.8 M gradients in 8 bits take 7.1 s with 4, 2.1 s with 16 and
#: 1.2 s with 32. Without a delay 32 take up to 4 % longer than 4, because results come later: one host has 4.
WINDOW, LEAST_WINDOW = 32, 4
#: Messages of a rank in flight, which MPI looks at again and again: with many ranks there are fewer segments.
MESSAGES = 512
#: Bytes below which a segment costs more time than its overlap saves.
SMALLEST_NBYTES = 64 * 1024
#: Bytes of a rank's share of a segment below which headers, of some 100 bytes, cost more than overlap gains.
SMALLEST_SHARE_NBYTES = 2048
#: Bytes of the largest message, half of the eager limit with which ocommrun starts Open MPI. From that limit on, MPI
#: asks the receiver first and sends in pieces: a sum of 25 M floats on 4 hosts at 1 Gbit/s then takes 1.4 times as long
#: as the wire needs, below the limit 1.03 times.
LARGEST_MESSAGE_NBYTES = 512 * 1024


class Cut(NamedTuple):
    """How the exchanges of an optimizer are cut, on all ranks alike.

    ``segment_nbytes`` limits the packed bytes of a segment, ``dense_nbytes`` the float32 bytes of a dense segment.
    Messages of a dense segment travel in pieces of ``message_nbytes``; 0: whole.
    """

    segment_nbytes: int
    dense_nbytes: int
    message_nbytes: int = 0


def cut_of(numel: int, ranks: int, hosts: int, limit_nbytes: int, on_devices: bool) -> Cut:
    """Returns how exchanges of ``numel`` elements are cut over ``ranks`` ranks on so many ``hosts``.

    In the host's memory a dense segment is small enough that none of its messages reaches TCP's eager limit. A device
    needs few segments: each costs launches and memory, whatever its size. Then messages between hosts are cut instead.
    One rank sends nothing, so nothing limits its segments but ``limit_nbytes``.

    Args:
        limit_nbytes: The user's limit, which is never exceeded.
        on_devices: True if the parameters of all ranks are on devices.
    """
    is_free = on_devices or ranks == 1
    packed = segment_nbytes(numel // 8, ranks, limit_nbytes, is_free=ranks == 1)
    dense = segment_nbytes(4 * numel, ranks, limit_nbytes, is_free=True) if is_free else packed
    return Cut(packed, dense, LARGEST_MESSAGE_NBYTES if on_devices and hosts > 1 else 0)


def window(ranks: int, hosts: int) -> int:
    """Returns the number of segments in flight on a channel of ``ranks`` ranks on so many ``hosts``."""
    if hosts == 1:
        return LEAST_WINDOW
    # In a segment each rank sends to all others, and receives from them.
    return min(WINDOW, max(MESSAGES // (2 * ranks), LEAST_WINDOW))


def segment_nbytes(total_nbytes: int, ranks: int, limit_nbytes: int, *, is_free: bool = False) -> int:
    """Returns the size of the segments in which ``total_nbytes`` are exchanged over ``ranks`` ranks, which own a share
    each.

    ``limit_nbytes`` is the user's limit, and is never exceeded. ``is_free``: a share may be longer than a message.
    """
    wanted = max(-(-total_nbytes // SEGMENTS), SMALLEST_NBYTES, ranks * SMALLEST_SHARE_NBYTES)
    return min(wanted, limit_nbytes if is_free else min(ranks * LARGEST_MESSAGE_NBYTES, limit_nbytes))


def share_nbytes(ranks: int) -> int:
    """Returns the size of the largest message of a dense sum of which ``ranks`` ranks own a share each.

    If several ranks send to one, their messages take as many times longer, and a segment waits for the last. With
    messages half as large a step on 4 hosts takes 0.95 of the time at 120 Mbit/s and 0.97 at 680.
    """
    return LARGEST_MESSAGE_NBYTES if ranks <= 2 else LARGEST_MESSAGE_NBYTES // 2


def message_nbytes(limit_nbytes: int) -> int:
    """Returns the size of the largest message that is not a share of a segment but cut by itself."""
    return min(limit_nbytes, LARGEST_MESSAGE_NBYTES)
