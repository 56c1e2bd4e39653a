"""Composition root: chooses network, engine, kernels and settings, and starts the runtime with them.

A ``Session`` is one rank's membership in a job. A process has one, ``current()``; tests run many, one per thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ocomm.collectives import pipeline
from ocomm.collectives.bridge import Bridge
from ocomm.collectives.engine import Channel, Engine
from ocomm.collectives.python_engine import PythonEngine
from ocomm.collectives.routes import arrange
from ocomm.collectives.scratch import Scratch
from ocomm.collectives.waiting import Watch
from ocomm.errors import (
    HorovodInternalError,
    InvalidRequestError,
    LaunchError,
    NotInitializedError,
    OcommError,
    SettingsError,
    StallError,
    clause,
)
from ocomm.kernels.base import Kernels
from ocomm.kernels.device import device_kernels
from ocomm.negotiation.autotune import Autotune, BayesianSearch, Tuned
from ocomm.negotiation.request import Kind, Request
from ocomm.runtime.background import Runtime
from ocomm.runtime.channels import free
from ocomm.runtime.exporter import open_exporter
from ocomm.runtime.handle import Handle, Submission
from ocomm.runtime.handshake import background_core, bounded, check_sets, confirmed, duplicate, handshake, topology_of
from ocomm.runtime.process_set import ProcessSet, no_thread
from ocomm.runtime.supervisor_client import SupervisorClient
from ocomm.runtime.tuner import Tuner
from ocomm.telemetry.counters import OptimizerCounters
from ocomm.telemetry.timeline import Timeline, path_of
from ocomm.transport.base import Transport
from ocomm.types import DType, Nodes, ReduceOp, Settings, Topology

if TYPE_CHECKING:
    from ocomm.kernels.cpu import Pool

_log = logging.getLogger("ocomm")
#: The reason that a rank gives if it leaves to join again.
REJOINS = "has left to join again"
#: How many of a session's ``at_end`` are called: a search over hyperparameters makes many optimizers.
_LAST_WORDS = 3
#: How many optimizers of a session are counted for whoever watches the job: the last ones.
_COUNTED = 8


class AtEnd(Protocol):
    """What has something to say when a session ends."""

    def at_end(self) -> None:
        """Called once, when all ranks have left in order. Communicates with nobody."""
        ...


class Rejoins(Protocol):
    """What may have an exchange under way when its rank leaves to join again."""

    def give_up_exchange(self) -> None:
        """Ends the exchange on this rank, because other ranks may never take part in it. Called in the thread that
        leaves.
        """
        ...


class Session:
    """One rank's membership in a job, from ``start`` to ``shutdown``. A session may be started again."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.settings = Settings()
        self.topology: Topology | None = None
        self.kernels: Kernels | None = None
        self._device_kernels: dict[int, Kernels] = {}
        #: Connects this rank's device with those of other ranks of its host; one per process (``nccl_opening``).
        self.bridge: Bridge | None = None
        #: Held while the bridge is opened.
        self.opening_bridge = threading.Lock()
        self.sets: dict[int, ProcessSet | None] = {}
        self.set_ranks: dict[int, tuple[int, ...]] = {}
        self.engine: Engine | None = None
        self.timeline: Timeline | None = None
        self.left_in_order = True  # whether the last shutdown was clean on all ranks
        self.supervisor: SupervisorClient | None = None  # of an elastic job; kept when the session is started again
        #: What connects the ranks, in words: the MPI, with its version.
        self.network = "no MPI"
        self.launch_ranks: Sequence[int] = ()  # the launcher's numbers of the ranks, if they differ
        self._pool: Pool | None = None
        #: Their ``at_end`` is called when the session ends in order, of the last ones alone where there are many.
        self.at_end: list[AtEnd] = []
        #: Return what this rank has done through its optimizers. A new list each time, because the background thread
        #: reads it.
        self.counted: list[Callable[[], OptimizerCounters]] = []
        #: Their ``give_up_exchange`` is called before this rank leaves to join again. Their owners keep them alive.
        self.rejoining: weakref.WeakSet[Rejoins] = weakref.WeakSet()
        #: Id of the process that has started the session, which alone may communicate; 0 before ``start``.
        self.pid = 0
        self._starts = 0
        #: Staging memory for plans of dense collectives.
        self.scratch = Scratch(0)
        self._next_set = 1
        self._members_parent: Transport | None = None  # of the communicators of ``add_members``
        self._members_sets = 0
        self._removed_members: list[ProcessSet] = []
        self._counts: dict[str, int] = {}

    # Starting and stopping

    @property
    def is_initialized(self) -> bool:
        return self.runtime is not None and not self.is_forked

    @property
    def has_failed(self) -> bool:
        """True if this job cannot go on: a rank has died or raised, or the network has failed."""
        return self.runtime is not None and self.runtime.failure is not None

    @property
    def is_rejoined(self) -> bool:
        """True if ranks have left the job to join it again, and wait for all others to do so."""
        return self.runtime is not None and REJOINS in self.runtime.departed().values()

    @property
    def is_forked(self) -> bool:
        """True in a child process, which has a copy of the session but none of its threads and connections."""
        return self.pid not in (0, os.getpid())

    def start(
        self,
        control: Transport,
        settings: Settings,
        process_sets: Sequence[Sequence[int]] = (),
        abi: Any = None,
        host: str | None = None,
    ) -> None:
        """Joins the job of the ranks of ``control``. Collective over these ranks.

        Args:
            control: The network between all ranks; the session owns it from now on.
            settings: This rank's settings.
            process_sets: Lists of world ranks, the same on all ranks; they get the ids 1, 2, ...
            abi: How C calls MPI; None if the network is not MPI.
            host: Name of this host; None to ask the system.

        Raises:
            SettingsError: A setting differs between ranks, or cannot be used.
            LaunchError: Some ranks do not come within ``start_timeout_s``, or this rank has no memory for the job or
                no working network.
        """
        sets = [tuple(ranks) for ranks in process_sets]
        self._pool = None
        try:
            self._join(control, settings, sets, abi, host or socket.gethostname())
        except BaseException as error:
            self._end_timeline()
            if self._pool is not None:
                self._pool.close()
            if isinstance(error, OcommError) or not isinstance(error, Exception):
                raise
            raise LaunchError(f"rank {control.rank} cannot join the job: {_words(error)}") from error

    def _join(
        self, control: Transport, settings: Settings, sets: Sequence[tuple[int, ...]], abi: Any, host: str
    ) -> None:
        hosts, self._counts = handshake(control, settings, sets, host, self._counts)
        topology = topology_of(control.rank, hosts)
        native = settings.engine == "native" and (abi is not None or control.size == 1)
        with confirmed(control, settings.start_timeout_s):
            tuner = _tuner(settings, self._starts + 1) if settings.autotune and control.rank == 0 else None
            self._pool = _kernel_threads(settings)
            self.kernels = _kernels(settings, self._pool)
            if native:
                from ocomm.collectives.native_engine import NativeEngine

                engine: Engine = NativeEngine(abi, settings.spin_us, settings.idle_ms, self._pool)
            else:
                engine = PythonEngine(self.kernels, control.arrival, settings.idle_ms)
            core = background_core(settings.thread_affinity, topology)
        self.engine = engine
        self.settings = settings
        self.scratch = Scratch(settings.scratch_nbytes)
        self.topology = topology
        world = self._open_set(0, range(control.size), control, tuner)
        runtime = Runtime(
            world,
            engine,
            settings,
            on_start=lambda: None if core is None else os.sched_setaffinity(0, {core}),
            on_loss=self.say_lost,
        )
        self.sets = {0: world}
        self.set_ranks = {0: tuple(range(control.size))}
        for number, ranks in enumerate(sets, 1):
            self.set_ranks[number] = ranks
            self.sets[number] = None
            if control.rank in ranks:
                member = self._open_set(number, ranks, control.subset(ranks))
                self.sets[number] = member
                runtime.add(member)
        self._next_set = len(sets) + 1
        self.pid = os.getpid()
        self._starts += 1
        if settings.timeline:
            self._write_timeline(settings.timeline, settings.timeline_mark_cycles, self._starts)
        runtime.exporter = open_exporter(
            self.topology,
            settings,
            self.supervisor,
            runtime.clock,
            waits=lambda: runtime.waits.waiting.copy().values(),
            stalls=lambda: [stall for one in self.sets.copy().values() if one is not None for stall in one.stalls],
            optimizers=lambda: [counted() for counted in self.counted],
        )
        runtime.start()
        self.runtime = runtime

    def say_lost(self, lost: dict[int, str]) -> None:
        """Tells the supervisor, if there is one, which ranks have failed. It knows them by the launcher's numbers."""
        if self.supervisor is not None:
            self.supervisor.say_lost(
                {self.launch_ranks[rank] if self.launch_ranks else rank: lost[rank] for rank in lost}
            )

    def shutdown(self, failed: bool = False, why: str = "shut down") -> bool:
        """Leaves the job. Collective unless ``failed``; does nothing before ``start``.

        Returns True if all ranks left in order.
        """
        if not self.is_initialized:
            return True
        assert self.runtime is not None and self.engine is not None
        if why == REJOINS:
            for owner in list(self.rejoining):
                owner.give_up_exchange()
        runtime, self.runtime = self.runtime, None
        clean = self.left_in_order = runtime.leave(failed, why)
        for member in self.sets.values():
            if member is not None and member.opening_bridge is not None:  # ends by itself, unless it waits for NCCL
                member.opening_bridge.join(self.settings.start_timeout_s)
        if runtime.exporter is not None:
            runtime.exporter.close()
        if self.bridge is not None:  # no rank has a transfer under way, or the job has failed
            self.bridge.end("the session is over")
            self.bridge = None
        self._end_timeline()
        parent, self._members_parent = self._members_parent, None
        removed, self._removed_members = self._removed_members, []
        if clean:
            for member in [*self.sets.values(), *removed]:
                if member is not None and not member.retired.is_set():
                    member.close_transports()
            if parent is not None:
                free(parent)
            self.engine.close()
        else:
            # The network may still use buffers of what was under way, so engine and communicators are kept as they are.
            _abandoned.append((self.engine, [*self.sets.values(), *removed], parent))
        self.engine = None
        if clean and not failed:
            for one in self.at_end[-_LAST_WORDS:]:
                one.at_end()
        self.at_end.clear()
        self.counted = []
        self.rejoining.clear()
        if self._pool is not None:
            self._pool.close()  # optimizers may keep the kernels, which go on without threads
        self.sets = {}
        return clean

    def _open_set(
        self, number: int, ranks: Sequence[int], transport: Transport, tuner: Tuner | None = None
    ) -> ProcessSet:
        """Makes this rank's member of a process set, which owns ``transport`` from now on."""
        assert self.engine is not None and self.topology is not None
        self.engine.watch(transport)
        data = duplicate(transport, self.settings.start_timeout_s)
        hosts = [self.topology.hosts[rank] for rank in ranks]
        nodes = arrange(hosts, "auto" if self.settings.hierarchical_allreduce else False, len(hosts))
        window = self.settings.window or pipeline.window(len(hosts), len(set(hosts)))
        settings = replace(self.settings, window=window)
        return ProcessSet(
            ranks, transport, data, self.engine, self.scratch, settings, nodes, number=number, tuner=tuner
        )

    # Process sets

    def add_set(self, ranks: Sequence[int]) -> int:
        """Registers another process set and returns its id. Collective over the world, in one order on all ranks.

        Raises:
            InvalidRequestError: A rank does not exist, or the set is registered already.
            MismatchError: The ranks do not add the same set.
        """
        runtime = self._require()
        topology = self.require_topology()
        added = tuple(sorted(ranks))
        number = self._next_set
        if added in self.set_ranks.values():
            raise InvalidRequestError(f"Attempted to add a duplicate process set: ranks {list(added)}.")
        check_sets([added], topology.size, number)
        # MPI makes the new communicator on a copy of the world's: there its messages cannot be taken for ours.
        request = Request(Kind.DUPLICATE, f"add_process_set.{number}", detail=f"ranks {list(added)}")
        world: Transport = self.submit(0, Submission.of(request)).wait()[0]
        member = None
        if topology.rank in added:
            seconds = self.settings.start_timeout_s
            try:
                transport = bounded(lambda: world.subset(added), seconds, f"a communicator for ranks {list(added)}")
                member = self._open_set(number, added, transport)
            except OcommError:
                raise
            except Exception as error:
                raise HorovodInternalError(
                    f"rank {topology.rank} cannot make process set {number}, ranks {list(added)}: {_words(error)}"
                ) from error
            member.timeline = self.timeline
            runtime.add(member)
        self._next_set += 1
        self.set_ranks[number] = added
        self.sets[number] = member
        self.agree(0, f"add_process_set.{number}", "done")
        free(world)
        return number

    def remove_set(self, number: int) -> None:
        """Forgets a process set. Collective over the world, in one order on all ranks.

        Operations of the set that some of its ranks have not asked for fail.

        Raises:
            MismatchError: The ranks do not remove the same set.
            StallError: The ranks of the set have not closed its channels within ``start_timeout_s``.
        """
        runtime = self._require()
        ranks, member = self.set_ranks[number], self.sets[number]
        if member is not None:  # a response to this comes after those to everything that ranks asked for before
            self.agree(number, "remove_process_set", "removed")
        self.agree(0, f"remove_process_set.{number}", f"ranks {list(ranks)}")
        del self.sets[number], self.set_ranks[number]
        if member is None:
            return
        runtime.retire(member)
        seconds = self.settings.start_timeout_s  # as for making a communicator
        end = runtime.clock() + seconds
        while not member.retired.wait(min(1.0, max(end - runtime.clock(), 0.0))):
            if runtime.failure is not None:
                raise type(runtime.failure)(*runtime.failure.args)
            if not runtime.is_alive:
                raise no_thread(self.require_topology().rank)
            if runtime.clock() >= end:
                raise StallError(
                    f"rank {self.require_topology().rank}: process set {list(ranks)} was removed, but its ranks have "
                    f"not closed its channels after {seconds:.0f} s (OCOMM_START_TIMEOUT): an exchange on one of them "
                    "does not end on some rank; see the other ranks."
                )

    def prepare_members(self) -> None:
        """Makes ``add_members`` possible. Collective over the world; a second call is a no-op."""
        if self._members_parent is None:
            request = Request(Kind.DUPLICATE, "add_members", detail="a communicator for sets of members")
            self._members_parent = self.submit(0, Submission.of(request)).wait()[0]

    @property
    def has_members(self) -> bool:
        """True if ``add_members`` can make sets, because ``prepare_members`` was called."""
        return self._members_parent is not None

    def add_members(self, ranks: Sequence[int], name: str) -> int:
        """Registers a process set that its members alone know of, and returns its number, which is this rank's own.

        Collective over the members, after ``prepare_members``: they make the sets that they share in one order. Unlike
        those of ``add_set``, several may have the same ranks, and all ranks of the world are allowed.

        Args:
            ranks: World ranks, ascending; this one is among them.
            name: Says which set it is, in errors.

        Raises:
            LaunchError: Some do not come within ``start_timeout_s``.
        """
        runtime, parent = self._require(), self._members_parent
        assert parent is not None
        seconds = self.settings.start_timeout_s
        transport = bounded(lambda: parent.subset(ranks), seconds, f"a communicator for {name}, ranks {list(ranks)}")
        self._members_sets += 1
        number = -self._members_sets
        member = self._open_set(number, ranks, transport)
        member.timeline = self.timeline
        self.sets[number] = member
        runtime.add(member)
        return number

    def remove_members(self, number: int) -> None:
        """Forgets a set of ``add_members``. Not collective: does not wait for the other members.

        The background thread retires the set once nothing of it is under way. Until then a caller that holds its
        ``ProcessSet`` can still submit; after that submissions fail. When all members have removed the set, its
        communicators are freed.
        """
        member = self.sets.pop(number, None)
        if member is not None:
            self._removed_members = [other for other in self._removed_members if not other.retired.is_set()]
            self._removed_members.append(member)
            self._require().retire(member)

    # Timeline

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Records from now on into ``path`` (``telemetry.timeline.path_of`` gives each rank its file), and ends the
        timeline before it.
        """
        self._require()
        self._end_timeline()
        self._write_timeline(path, mark_cycles)

    def stop_timeline(self) -> None:
        """Ends the timeline, if there is one. Its file is complete when this returns."""
        self._require()
        self._end_timeline()

    def _write_timeline(self, path: str, mark_cycles: bool, start: int = 1) -> None:
        assert self.topology is not None and self.settings is not None
        rank = self.topology.rank
        label = f"rank {rank} on {self.topology.hosts[rank]}"
        file = path_of(path, rank, start, self.settings.elastic_generation)
        self._record_into(Timeline(file, rank, label, mark_cycles))

    def _end_timeline(self) -> None:
        timeline = self.timeline
        if timeline is not None:
            self._record_into(None)
            timeline.close()

    def _record_into(self, timeline: Timeline | None) -> None:
        self.timeline = timeline
        if self.engine is not None:
            self.engine.timeline = timeline
        for member in self.sets.values():
            if member is not None:
                member.timeline = timeline

    # Counters

    def count(self, counters: Callable[[], OptimizerCounters]) -> None:
        """Notes an optimizer that is to be counted, in place of the oldest one where there are many.

        Args:
            counters: Returns its counters, from any thread. It must not keep the optimizer alive.
        """
        self.counted = [*self.counted, counters][-_COUNTED:]

    # Using

    def _require(self) -> Runtime:
        if self.runtime is None:
            raise NotInitializedError("ocomm has not been initialized; call init() first.")
        if self.pid != os.getpid():
            raise NotInitializedError(
                f"this process (pid {os.getpid()}) was forked from rank {self.topology.rank if self.topology else '?'} "
                f"(pid {self.pid}), which is the one that may communicate."
            )
        return self.runtime

    def require_topology(self) -> Topology:
        """Returns the place of this rank in the job. Raises NotInitializedError before ``start``."""
        self._require()
        assert self.topology is not None
        return self.topology

    def member_set(self, number: int) -> ProcessSet:
        """Returns the process set ``number``. Raises InvalidRequestError if this rank is not a member of it."""
        self._require()
        if number not in self.sets:
            raise InvalidRequestError(f"process set {number} does not exist, or has not been registered.")
        member = self.sets[number]
        if member is None:
            rank = self.require_topology().rank
            raise InvalidRequestError(
                f"rank {rank} is not a member of process set {number} (ranks {list(self.set_ranks[number])})."
            )
        return member

    def nodes(self, number: int, hierarchical: bool | Literal["auto"] = "auto") -> Nodes:
        """Returns how the ranks of process set ``number`` exchange compressed values, as ``routes.arrange`` decides."""
        hosts = self.require_topology().hosts
        ranks = self.member_set(number).ranks
        return arrange([hosts[rank] for rank in ranks], hierarchical, self.settings.direct_peers)

    def submit(self, number: int, submission: Submission) -> Handle:
        """Queues all tensors of a submission in process set ``number``, or none if one cannot be queued."""
        return self.member_set(number).submit(submission)

    def automatic_name(self, operation: str, number: int = 0) -> str:
        """Returns a name for a tensor without one.

        Names are counted per process set and operation, so a call that only some ranks make does not shift the names of
        others.
        """
        return f"{operation}.noname.{self.ordinal(operation, number)}"

    def ending(self, what: str, number: int = 0) -> str:
        """Returns what distinguishes the things named ``what`` of a process set: "" for the first, "#2" for the second,
        ... All ranks make them in the same order.
        """
        ordinal = self.ordinal(what, number)
        return "" if ordinal == 1 else f"#{ordinal}"

    def ordinal(self, what: str, number: int = 0) -> int:
        """Returns 1, 2, 3, ... for the things named ``what`` that all ranks of a process set make in the same order.

        Numbers are unique in this process. Ranks that join a job again after different failures continue from the
        highest number of any rank.
        """
        key = f"{what} {number}"
        self._counts[key] = count = self._counts.get(key, 0) + 1
        return count

    def open_channel(self, number: int, name: str, digest: int, detail: str) -> Channel:
        """Opens a channel for fixed-layout exchanges. Collective in the set; raises MismatchError if ``digest``
        differs.
        """
        request = Request(Kind.CHANNEL, name, digest=digest, detail=detail)
        return self.submit(number, Submission.of(request)).wait()[0]

    def release_channel(self, number: int, channel: Channel) -> None:
        """Says that this rank will not use a channel of ``open_channel`` again; once no rank does, it is closed.

        Not collective, and safe in a finalizer.
        """
        member = self.sets.get(number)
        if member is not None:
            member.release(channel)

    @contextlib.contextmanager
    def enclosed_step(self) -> Iterator[None]:
        """Marks this thread as one that makes a step for another thread, which waits for it inside a framework
        (``Waits.enclosed``).
        """
        enclosed = self._require().waits.enclosed
        enclosed.add(threading.get_ident())
        try:
            yield
        finally:
            enclosed.discard(threading.get_ident())

    def watch(self, number: int, name: str) -> Watch:
        """Returns what a thread looks at while it waits for an exchange of ``name``, the same on all ranks of the
        process set.
        """
        runtime = self._require()
        ranks = list(self.member_set(number).ranks)

        def failure() -> OcommError | None:
            if runtime.failure is None and self.runtime is runtime and number not in self.sets:
                return InvalidRequestError(f"process set {ranks} was removed.")
            if runtime.failure is None and not runtime.is_alive:
                return no_thread(runtime.world.rank)
            return runtime.failure

        def departed() -> dict[int, str]:
            members = [member for member in list(self.sets.values()) if member is not None]
            joined = {rank: "has joined" for member in members for rank in member.joined}
            return {**joined, **runtime.departed()}

        warn_s = self.settings.stall_check_s if self.settings.stall_check else 0.0
        return Watch(failure, departed, warn_s, f"{name} {number}", runtime.waits, runtime.is_serving)

    def agree(self, number: int, name: str, detail: str) -> None:
        """Waits until all ranks of the set say the same ``detail`` about ``name``. Raises MismatchError if they do
        not.
        """
        request = Request(Kind.BARRIER, name, detail=detail)
        self.submit(number, Submission.of(request)).wait()

    def device_kernels(self, number: int) -> Kernels:
        """Returns the kernels of CUDA device ``number``, made at the first call. Raises InvalidRequestError without
        numba-cuda.
        """
        if number not in self._device_kernels:
            try:
                from ocomm.kernels.cuda_device import CudaDevice

                kernels = device_kernels(CudaDevice(number), self.settings.stall_shutdown_s)
            except ImportError as error:
                raise InvalidRequestError(
                    f"parameters are on GPU {number}, for which ocomm needs numba-cuda: pip install 'ocomm[gpu-cu12]' "
                    f"or 'ocomm[gpu-cu13]', as torch.version.cuda says ({error})."
                ) from error
            from ocomm.transport import cuda_probe

            found = (
                cuda_probe.device_messages(self.settings.cuda_aware, number)
                if self.require_topology().size > 1
                else None
            )
            if found is not None:
                which = "addresses on it" if found.yes else "copies in pinned memory"
                _log.info("CUDA device %d: MPI is given %s: %s", number, which, found.why)
            kernels.memory.reached_by_network = found is not None and found.yes  # type: ignore[attr-defined]
            self._device_kernels[number] = kernels
        return self._device_kernels[number]

    def reduce(self, number: int, name: str, array: np.ndarray, op: ReduceOp) -> None:
        """Reduces a contiguous NumPy array in place over process set ``number``; waits."""
        dtype = DType.from_numpy(array.dtype)
        flat = array.reshape(-1).view(np.uint8)
        request = Request(Kind.ALLREDUCE, name, dtype, array.shape, op)
        self.submit(number, Submission.of(request, flat, flat)).wait()

    def broadcast(self, number: int, name: str, array: np.ndarray) -> None:
        """Replaces the array on every rank by that of the set's first rank, in place; waits."""
        flat = array.reshape(-1).view(np.uint8)
        request = Request(Kind.BROADCAST, name, DType.from_numpy(array.dtype), array.shape, root=0)
        self.submit(number, Submission.of(request, flat, flat)).wait()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {clause(error)}"


def _tuner(settings: Settings, number: int) -> Tuner:
    """Makes the tuner of ``settings.autotune`` for this process's start ``number``. Raises SettingsError if its package
    is missing or its log cannot be written.
    """
    start, names = Tuned.of(settings), settings.autotune
    autotune = Autotune(
        start,
        names,
        settings.autotune_warmup_samples,
        settings.autotune_steps_per_sample,
        settings.autotune_max_points,
    )
    log = settings.autotune_log and str(path_of(settings.autotune_log, 0, number, settings.elastic_generation))
    try:
        return Tuner(autotune, BayesianSearch(names, settings.autotune_noise), names, log)
    except OSError as error:
        raise SettingsError(
            f"OCOMM_AUTOTUNE_LOG={settings.autotune_log!r} cannot be written: {clause(error)}."
        ) from None


def _kernel_threads(settings: Settings) -> Pool | None:
    if settings.kernel_threads == 1:
        return None
    from ocomm.kernels.cpu import Pool

    return Pool(settings.kernel_threads)


def _kernels(settings: Settings, pool: Pool | None) -> Kernels:
    if settings.kernels == "reference":
        from ocomm.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    from ocomm.kernels.cpu import CpuKernels

    return CpuKernels(pool)


# The session of this process

_abandoned: list[tuple[Engine, list[ProcessSet | None], Transport | None]] = []
_process_session = Session()
_current: contextvars.ContextVar[Session | None] = contextvars.ContextVar("ocomm_session", default=None)


def current() -> Session:
    """Returns the session that a test has set for this thread, else the session of the process."""
    return _current.get() or _process_session


def of_process() -> Session:
    """Returns the session of the process."""
    return _process_session


def use(session: Session | None) -> None:
    """Makes ``session`` the current one in this thread."""
    _current.set(session)
