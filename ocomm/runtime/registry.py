"""The process sets that a rank knows of, and its members of them.

Sets of ``add`` are known to all ranks of the world, which register them in one order, so that a number means the same
everywhere; the world is number 0. Sets of ``add_members`` are known to their members alone, and each rank numbers its
own: -1, -2, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ocomm.collectives import pipeline
from ocomm.collectives.engine import Engine
from ocomm.collectives.routes import arrange
from ocomm.collectives.scratch import Scratch
from ocomm.errors import HorovodInternalError, InvalidRequestError, OcommError, StallError, in_words
from ocomm.negotiation.request import Kind, Request
from ocomm.runtime.background import Runtime
from ocomm.runtime.channels import free
from ocomm.runtime.handle import Submission
from ocomm.runtime.handshake import bounded, check_sets, duplicate
from ocomm.runtime.process_set import MemberSet, no_thread
from ocomm.runtime.tuner import Tuner
from ocomm.telemetry.timeline import Timeline
from ocomm.transport.base import Transport
from ocomm.types import Settings, Topology


class Registry:
    """The process sets of a rank from the start of its session to the end. Used by the user's threads."""

    def __init__(self, topology: Topology, settings: Settings, engine: Engine, scratch: Scratch) -> None:
        #: World ranks of each set that all ranks know of, ascending.
        self.ranks: dict[int, tuple[int, ...]] = {}
        #: This rank's member of each set; None if it is not in the set.
        self.members: dict[int, MemberSet | None] = {}
        self._topology = topology
        self._settings = settings
        self._engine = engine
        self._scratch = scratch
        self._runtime: Runtime | None = None
        self._timeline: Timeline | None = None
        self._next = 0
        self._parent: Transport | None = None  # of the communicators of ``add_members``
        self._own = 0  # sets of ``add_members`` so far
        self._removed: list[MemberSet] = []  # of ``add_members``, not all retired

    def open_world(self, control: Transport, tuner: Tuner | None) -> MemberSet:
        """Makes set 0, of all ranks, which owns ``control`` from now on. Once, before ``begin``."""
        world = self._open(0, range(control.size), control, tuner)
        self._register(tuple(world.ranks), world)
        return world

    def begin(self, runtime: Runtime, sets: Sequence[tuple[int, ...]], control: Transport) -> None:
        """Makes the sets that ranks are started with, which ``runtime`` serves from now on, like those added later.
        Collective over the world; the network is the caller's, because the background thread does not run yet.
        """
        self._runtime = runtime
        for ranks in sets:
            member = None
            if self._topology.rank in ranks:
                member = self._open(self._next, ranks, control.subset(ranks))
                runtime.add(member)
            self._register(ranks, member)

    def member(self, number: int) -> MemberSet:
        """Returns this rank's member of a set. Raises InvalidRequestError if there is none."""
        if number not in self.members:
            raise InvalidRequestError(f"process set {number} does not exist, or has not been registered.")
        member = self.members[number]
        if member is None:
            raise InvalidRequestError(
                f"rank {self._topology.rank} is not a member of process set {number} "
                f"(ranks {list(self.ranks[number])})."
            )
        return member

    def opened(self) -> list[MemberSet]:
        """Returns the sets that this rank is a member of. May be called from any thread."""
        return [member for member in self.members.copy().values() if member is not None]

    def agree(self, number: int, name: str, detail: str) -> None:
        """Waits until all ranks of the set say the same ``detail`` about ``name``. Raises MismatchError if they do
        not.
        """
        self.member(number).submit(Submission.of(Request(Kind.BARRIER, name, detail=detail))).wait()

    # Sets that all ranks know of

    def add(self, ranks: Sequence[int]) -> int:
        """Registers another process set and returns its number. Collective over the world, in one order on all ranks.

        Raises:
            InvalidRequestError: A rank does not exist, or the set is registered already.
            MismatchError: The ranks do not add the same set.
        """
        added = tuple(sorted(ranks))
        number = self._next
        if added in self.ranks.values():
            raise InvalidRequestError(f"Attempted to add a duplicate process set: ranks {list(added)}.")
        check_sets([added], self._topology.size, number)
        # MPI makes the new communicator on a copy of the world's: there its messages cannot be taken for ours.
        world = self._copy_of_world(f"add_process_set.{number}", f"ranks {list(added)}")
        member = None
        if self._topology.rank in added:
            try:
                member = self._open_from(world, number, added, "")
            except OcommError:
                raise
            except Exception as error:
                raise HorovodInternalError(
                    f"rank {self._topology.rank} cannot make process set {number}, ranks {list(added)}: "
                    f"{in_words(error)}"
                ) from error
        self._register(added, member)
        self.agree(0, f"add_process_set.{number}", "done")
        free(world)
        return number

    def remove(self, number: int) -> None:
        """Forgets a process set. Collective over the world, in one order on all ranks.

        Operations of the set that some of its ranks have not asked for fail.

        Raises:
            MismatchError: The ranks do not remove the same set.
            StallError: The ranks of the set have not closed its channels within ``start_timeout_s``.
        """
        ranks, member = self.ranks[number], self.members[number]
        if member is not None:  # a response to this comes after those to everything that ranks asked for before
            self.agree(number, "remove_process_set", "removed")
        self.agree(0, f"remove_process_set.{number}", f"ranks {list(ranks)}")
        del self.members[number], self.ranks[number]
        if member is not None:
            self._require().retire(member)
            self._wait_until_retired(member)

    def _wait_until_retired(self, member: MemberSet) -> None:
        runtime, rank = self._require(), self._topology.rank
        seconds = self._settings.start_timeout_s  # as for making a communicator
        end = runtime.clock() + seconds
        while not member.retired.wait(min(1.0, max(end - runtime.clock(), 0.0))):
            if runtime.failure is not None:
                raise type(runtime.failure)(*runtime.failure.args)
            if not runtime.is_alive:
                raise no_thread(rank)
            if runtime.clock() >= end:
                raise StallError(
                    f"rank {rank}: process set {list(member.ranks)} was removed, but its ranks have not closed its "
                    f"channels after {seconds:.0f} s (OCOMM_START_TIMEOUT): an exchange on one of them does not end on "
                    "some rank; see the other ranks."
                )

    # Sets that their members alone know of

    def prepare_members(self) -> None:
        """Makes ``add_members`` possible. Collective over the world; a second call is a no-op."""
        if self._parent is None:
            self._parent = self._copy_of_world("add_members", "a communicator for sets of members")

    @property
    def has_members(self) -> bool:
        """True if ``add_members`` can make sets, because ``prepare_members`` was called."""
        return self._parent is not None

    def add_members(self, ranks: Sequence[int], name: str) -> int:
        """Registers a process set that its members alone know of, and returns its number, which is this rank's own.

        Collective over the members, after ``prepare_members``: they make the sets that they share in one order. Unlike
        those of ``add``, several may have the same ranks, and all ranks of the world are allowed.

        Args:
            ranks: World ranks, ascending; this one is among them.
            name: Says which set it is, in errors.

        Raises:
            LaunchError: Some do not come within ``start_timeout_s``.
        """
        assert self._parent is not None
        number = -self._own - 1
        member = self._open_from(self._parent, number, ranks, f"{name}, ")
        self._own += 1
        self.members[number] = member
        return number

    def remove_members(self, number: int) -> None:
        """Forgets a set of ``add_members``. Not collective: does not wait for the other members.

        The background thread retires the set once nothing of it is under way. Until then a caller that holds its
        ``MemberSet`` can still submit; after that submissions fail. When all members have removed the set, its
        communicators are freed.
        """
        member = self.members.pop(number, None)
        if member is not None:
            self._removed = [other for other in self._removed if not other.retired.is_set()]
            self._removed.append(member)
            self._require().retire(member)

    # For all of them

    def record_into(self, timeline: Timeline | None) -> None:
        """Lets all sets, also those to come, write to a timeline; None for no timeline."""
        self._timeline = timeline
        for member in self.opened():
            member.timeline = timeline

    def close(self) -> None:
        """Gives the communicators back. Only if all ranks have left in order: the network may still use those of a job
        that failed.
        """
        for member in [*self.opened(), *self._removed]:
            if not member.retired.is_set():
                member.close_transports()
        if self._parent is not None:
            free(self._parent)

    def _register(self, ranks: tuple[int, ...], member: MemberSet | None) -> None:
        self.ranks[self._next] = ranks
        self.members[self._next] = member
        self._next += 1

    def _copy_of_world(self, name: str, detail: str) -> Transport:
        request = Request(Kind.DUPLICATE, name, detail=detail)
        copy: Transport = self.member(0).submit(Submission.of(request)).wait()[0]
        return copy

    def _open_from(self, parent: Transport, number: int, ranks: Sequence[int], name: str) -> MemberSet:
        what = f"a communicator for {name}ranks {list(ranks)}"
        transport = bounded(lambda: parent.subset(ranks), self._settings.start_timeout_s, what)
        member = self._open(number, ranks, transport)
        self._require().add(member)
        return member

    def _open(self, number: int, ranks: Sequence[int], transport: Transport, tuner: Tuner | None = None) -> MemberSet:
        """Makes this rank's member of a process set, which owns ``transport`` from now on."""
        settings = self._settings
        self._engine.watch(transport)
        data = duplicate(transport, settings.start_timeout_s)
        hosts = [self._topology.hosts[rank] for rank in ranks]
        nodes = arrange(hosts, "auto" if settings.hierarchical_allreduce else False, len(hosts))
        window = settings.window or pipeline.window(len(hosts), len(set(hosts)))
        member = MemberSet(
            ranks,
            transport,
            data,
            self._engine,
            self._scratch,
            replace(settings, window=window),
            nodes,
            number=number,
            tuner=tuner,
        )
        member.timeline = self._timeline
        return member

    def _require(self) -> Runtime:
        assert self._runtime is not None
        return self._runtime
