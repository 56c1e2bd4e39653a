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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ocomm.collectives.bridge import Bridge
from ocomm.collectives.engine import Channel, Engine
from ocomm.collectives.python_engine import PythonEngine
from ocomm.collectives.routes import arrange
from ocomm.collectives.scratch import Scratch
from ocomm.collectives.waiting import REJOINS, Watch
from ocomm.devices import Devices
from ocomm.errors import (
    InvalidRequestError,
    LaunchError,
    NotInitializedError,
    OcommError,
    SettingsError,
    clause,
    in_words,
)
from ocomm.kernels.base import Kernels
from ocomm.negotiation.autotune import Autotune, BayesianSearch, Tuned
from ocomm.negotiation.request import Kind, Request
from ocomm.runtime.background import Runtime
from ocomm.runtime.exporter import open_exporter
from ocomm.runtime.handle import Handle, Submission
from ocomm.runtime.handshake import background_core, confirmed, handshake, topology_of
from ocomm.runtime.process_set import MemberSet, no_thread
from ocomm.runtime.registry import Registry
from ocomm.runtime.supervisor_client import SupervisorClient
from ocomm.runtime.tuner import Tuner
from ocomm.telemetry.counters import OptimizerCounters
from ocomm.telemetry.timeline import Timeline, path_of
from ocomm.transport.base import Transport
from ocomm.types import DType, Nodes, ReduceOp, Settings, Topology

if TYPE_CHECKING:
    from ocomm.kernels.cpu import Pool

_log = logging.getLogger("ocomm")
#: How many of a session's ``at_end`` are called: a search over hyperparameters makes many optimizers.
_LAST_WORDS = 3
#: How many optimizers of a session are counted for whoever watches the job: the last ones.
_COUNTED = 8


class AtEnd(Protocol):
    """What has something to say when a session ends."""

    def at_end(self, goes_on: bool) -> None:
        """Called once, when all ranks have left in order. Communicates with nobody. ``goes_on``: an elastic run goes on
        in another job.
        """
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
        self._devices = Devices()
        #: Connects this rank's device with those of other ranks of its host; one per process (``nccl_opening``).
        self.bridge: Bridge | None = None
        #: Who else in this process uses NCCL, in words; "" for nobody. NCCL wants the calls of all its communicators in
        #: one order, which nobody keeps between such a user and a bridge.
        self.other_nccl = ""
        #: Held while the bridge is opened.
        self.opening_bridge = threading.Lock()
        #: World ranks of the process sets that all ranks know of, by id; after ``shutdown`` those of the last job.
        self.set_ranks: Mapping[int, tuple[int, ...]] = {}
        self._registry: Registry | None = None
        self.engine: Engine | None = None
        self.timeline: Timeline | None = None
        self.left_in_order = True  # whether the last shutdown was clean on all ranks
        self._departed: dict[int, str] = {}  # the ranks that had left when this one did, and how
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
        #: Number of times that this session was started.
        self.starts = 0
        #: Staging memory for plans of dense collectives.
        self.scratch = Scratch(0)
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
    def left_for_good(self) -> dict[int, str]:
        """The ranks that have left the job, or had when this one left, and do not join again; and how they left."""
        departed = self._departed if self.runtime is None else self.runtime.departed()
        return {rank: how for rank, how in departed.items() if how != REJOINS}

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
            raise LaunchError(f"rank {control.rank} cannot join the job: {in_words(error)}") from error

    def _join(
        self, control: Transport, settings: Settings, sets: Sequence[tuple[int, ...]], abi: Any, host: str
    ) -> None:
        hosts, self._counts = handshake(control, settings, sets, host, self._counts)
        topology = topology_of(control.rank, hosts)
        native = settings.engine == "native" and (abi is not None or control.size == 1)
        with confirmed(control, settings.start_timeout_s):
            tuner = _tuner(settings, self.starts + 1) if settings.autotune and control.rank == 0 else None
            self._pool = _kernel_threads(settings)
            self.kernels = _kernels(settings, self._pool)
            if native:
                from ocomm.collectives.native_engine import NativeEngine

                engine: Engine = NativeEngine(
                    abi, settings.spin_us, settings.idle_ms, self._pool, is_alone=topology.local_size == 1
                )
            else:
                engine = PythonEngine(self.kernels, control.arrival, settings.idle_ms)
            core = background_core(settings.thread_affinity, topology)
        self.engine = engine
        self.settings = settings
        self.scratch = Scratch(settings.scratch_nbytes)
        self.topology = topology
        registry = self._registry = Registry(topology, settings, engine, self.scratch)
        self.set_ranks = registry.ranks
        world = registry.open_world(control, tuner)
        runtime = Runtime(
            world,
            engine,
            settings,
            on_start=lambda: None if core is None else os.sched_setaffinity(0, {core}),
            on_loss=self.say_lost,
        )
        registry.begin(runtime, sets, control)
        self.pid = os.getpid()
        self.starts += 1
        if settings.timeline:
            self._write_timeline(settings.timeline, settings.timeline_mark_cycles, self.starts)
        runtime.exporter = open_exporter(
            self.topology,
            settings,
            self.supervisor,
            runtime.clock,
            waits=lambda: runtime.waits.waiting.copy().values(),
            stalls=lambda: [stall for one in registry.opened() for stall in one.stalls],
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

    def shutdown(self, failed: bool = False, why: str = "shut down", goes_on: bool = False) -> bool:
        """Leaves the job. Collective unless ``failed``; does nothing before ``start``. ``goes_on``: an elastic run goes
        on in another job.

        Returns True if all ranks left in order.
        """
        if not self.is_initialized:
            return True
        assert self.runtime is not None and self.engine is not None and self._registry is not None
        if why == REJOINS:
            for owner in list(self.rejoining):
                owner.give_up_exchange()
        runtime, self.runtime = self.runtime, None
        clean = self.left_in_order = runtime.leave(failed, why)
        self._departed = runtime.departed()
        for member in self._registry.opened():
            if member.opening_bridge is not None:  # ends by itself, unless it waits for NCCL
                member.opening_bridge.join(self.settings.start_timeout_s)
        if runtime.exporter is not None:
            runtime.exporter.close()
        if self.bridge is not None:  # no rank has a transfer under way, or the job has failed
            self.bridge.end("the session is over")
            self.bridge = None
        self._end_timeline()
        registry, self._registry = self._registry, None
        if clean:
            registry.close()
            self.engine.close()
        else:
            # The network may still use buffers of what was under way, so engine and communicators are kept as they are.
            _abandoned.append((self.engine, registry))
        self.engine = None
        if clean and not failed:
            for one in self.at_end[-_LAST_WORDS:]:
                one.at_end(goes_on)
        self.at_end.clear()
        self.counted = []
        self.rejoining.clear()
        if self._pool is not None:
            self._pool.close()  # optimizers may keep the kernels, which go on without threads
        return clean

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
        if self._registry is not None:
            self._registry.record_into(timeline)

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
            raise self._not_initialized()
        if self.pid != os.getpid():
            raise NotInitializedError(
                f"this process (pid {os.getpid()}) was forked from rank {self.topology.rank if self.topology else '?'} "
                f"(pid {self.pid}), which is the one that may communicate."
            )
        return self.runtime

    def known_topology(self) -> Topology:
        """Returns the place of this rank in the job. Processes that the rank has forked, such as workers of data
        loaders, may ask for it, too. Raises NotInitializedError before ``start`` and after ``shutdown``.
        """
        if self.runtime is None:
            raise self._not_initialized()
        assert self.topology is not None
        return self.topology

    def _not_initialized(self) -> NotInitializedError:
        how = "was shut down; call init() again" if self.starts else "has not been initialized; call init() first"
        return NotInitializedError(f"ocomm {how}.")

    def require_topology(self) -> Topology:
        """Returns the place of this rank in the job, if this process may communicate. Raises NotInitializedError."""
        self._require()
        assert self.topology is not None
        return self.topology

    @property
    def registry(self) -> Registry:
        """The process sets of this rank. Raises NotInitializedError before ``start``."""
        self._require()
        assert self._registry is not None
        return self._registry

    def member_set(self, number: int) -> MemberSet:
        """Returns the process set ``number``. Raises InvalidRequestError if this rank is not a member of it."""
        self._require()
        assert self._registry is not None
        member = self._registry.members.get(number)
        return member if member is not None else self._registry.member(number)  # which says why there is none

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
        registry = self._registry
        member = registry.members.get(number) if registry is not None else None
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
        runtime, registry = self._require(), self.registry
        ranks = list(registry.member(number).ranks)

        def failure() -> OcommError | None:
            if runtime.failure is None and self.runtime is runtime and number not in registry.members:
                return InvalidRequestError(f"process set {ranks} was removed.")
            if runtime.failure is None and not runtime.is_alive:
                return no_thread(runtime.world.rank)
            return runtime.failure

        def departed() -> dict[int, str]:
            joined = {rank: "has joined" for member in registry.opened() for rank in member.joined}
            return {**joined, **runtime.departed()}

        warn_s = self.settings.stall_check_s if self.settings.stall_check else 0.0
        return Watch(
            failure,
            departed,
            warn_s,
            f"{name} {number}",
            runtime.waits,
            runtime.is_serving,
            interrupt=runtime.interrupt,
        )

    def agree(self, number: int, name: str, detail: str) -> None:
        """Waits until all ranks of the set say the same ``detail`` about ``name``. Raises MismatchError if they do
        not.
        """
        self.registry.agree(number, name, detail)

    def device_kernels(self, number: int) -> Kernels:
        """Returns the kernels of CUDA device ``number``, made at the first call. Raises InvalidRequestError without
        numba-cuda.
        """
        return self._devices.kernels(number, self.settings, self.require_topology().size > 1)

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

_abandoned: list[tuple[Engine, Registry]] = []
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
