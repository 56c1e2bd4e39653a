"""What an averaging of gradients compares between the ranks: hyperparameters, and the variables, part by part.

``ocomm.training.comparison`` says what is sent and reported. Variables are read in place, a window of them in each
step: in eager mode by the call that averages; in a graph by an operation between what has changed them before and what
changes them next, on the thread ``ocomm-tensorflow``.
"""

from __future__ import annotations

import functools
import inspect
import os
import platform
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ocomm import session as sessions
from ocomm.agreement import digest
from ocomm.errors import HorovodInternalError, StallError
from ocomm.kernels.base import Kernels
from ocomm.operations import Operation, ProcessSet
from ocomm.optim.replicas import ReplicaWindows
from ocomm.session import Session
from ocomm.training.comparison import StepComparison, spelled
from ocomm.training.notices import DenseNotices
from ocomm_tf import engine

#: Arguments of constructors that are no hyperparameters, or that are compared in another way.
_OTHERS = ("self", "name", "learning_rate", "inner_optimizer", "args", "kwargs")
#: Keras' optimizers that work elementwise, so that their results do not depend on the number of threads.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Ftrl", "Lion")

#: The comparisons of variables of each runtime, by what is compared.
_comparisons: weakref.WeakKeyDictionary[Any, dict[Any, Comparison]] = weakref.WeakKeyDictionary()


def comparison_of(
    what: str, kind: str, names: Sequence[str], variables: Sequence[Any], process_set: ProcessSet
) -> Comparison | None:
    """Returns the comparison of these variables, which continues from call to call.

    Args:
        what: Names what averages their gradients; the same on all ranks.
        kind: The kind of the optimizer, "" for a tape.
        names: The names of the variables, the same on all ranks.
        variables: Variables of TensorFlow, of Keras, or of Keras' Torch backend.
        process_set: The ranks that are compared.

    Returns:
        The comparison; None if comparing is switched off, or if there are only tensors.
    """
    session = sessions.current()
    steps = session.settings.replica_check_steps
    pairs = [(name, plain) for name, v in zip(names, variables, strict=True) if (plain := _plain(v)) is not None]
    if not steps or not pairs:
        return None
    number = process_set.number(session)
    known = _comparisons.setdefault(session.runtime, {})
    key = (what, kind, number, tuple(id(plain) for _, plain in pairs))
    found = known.get(key)
    if found is None or not found.is_of([plain for _, plain in pairs]):
        for old in [k for k, comparison in known.items() if not comparison.is_alive]:
            del known[old]
        found = known[key] = Comparison(session, number, what, kind, pairs)
    return found


def _plain(source: Any) -> Any:
    """Returns the variable as its framework has it; None for what is no variable."""
    value = source.value if hasattr(source, "path") else source
    if isinstance(value, tf.Variable):
        return value if hasattr(value, "handle") and value.shape.is_fully_defined() else None
    return value if _is_torch(value) else None


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


class Comparison:
    """Compares variables whose gradients are averaged together. It does not keep them alive."""

    def __init__(self, session: Session, number: int, what: str, kind: str, pairs: Sequence[tuple[str, Any]]) -> None:
        self._names = [name for name, _ in pairs]
        self._variables = [weakref.ref(plain) for _, plain in pairs]
        self._lines: Sequence[str] = ()
        self._turns: deque[_Turn] = deque()
        self.lock = threading.Lock()
        self.what = what
        #: Deadline of a comparison in seconds; None: no limit.
        self.patience_s = session.settings.stall_shutdown_s or None
        variables = [plain for _, plain in pairs]
        #: True if this rank cannot read parameters.
        self._is_on_device = any(map(_is_on_device, variables))
        kernels = session.kernels
        assert kernels is not None
        self._kernels: Kernels = kernels
        self._nbytes = np.array([_nbytes(plain) for plain in variables], np.int64)
        self._windows = ReplicaWindows(self._nbytes, session.settings.replica_check_steps, self._kernels)
        name = f"{what}.compared.{digest((kind, self._names)):016x}"
        ordinal = session.ordinal(name, number)  # distinguishes equal comparisons that exist at once
        self._session = session
        self._make_rows = functools.partial(
            StepComparison,
            session,
            number,
            name if ordinal == 1 else f"{name}#{ordinal}",
            what,
            "keras",
            _way(kind, variables),
            self._hyperparameters,
            self._checksum,
            self._describe,
        )
        self._runtime: Any = None
        self.rows: StepComparison
        #: Counts the steps, which are as many as the comparisons.
        self.notices: DenseNotices | None = None

    @property
    def is_alive(self) -> bool:
        """True if its variables still exist."""
        return all(reference() is not None for reference in self._variables)

    def is_of(self, variables: Sequence[Any]) -> bool:
        """Returns True if these are its variables."""
        return all(reference() is plain for reference, plain in zip(self._variables, variables, strict=True))

    def begin(self, lines: Sequence[str]) -> Operation:
        """Sends this rank's row, once the comparison before it is over.

        Args:
            lines: One for each hyperparameter.

        Returns:
            An operation without a result, whose ``wait`` raises MismatchError, on all ranks, if they differ.
        """
        turn = _Turn(self, lines)
        with self.lock:
            self._turns.append(turn)
            is_first = len(self._turns) == 1
        if is_first:
            turn.start()
        return turn

    def add_to_graph(self, lines: Sequence[str], rate: Any) -> tf.Tensor:
        """Adds ``begin`` to the graph under construction; later changes of the variables wait for its end.

        Args:
            lines: One for each hyperparameter.
            rate: The learning rate, a scalar tensor, which is one more hyperparameter; None without one.

        Returns:
            A tensor that is there when the comparison has ended well.
        """
        value = tf.zeros((), tf.float32) if rate is None else tf.reshape(tf.cast(rate, tf.float32), ())

        def begin(found: float) -> Operation:
            return self.begin(lines if rate is None else [*lines, rate_line(found)])

        def start(tensors: list[Any], name: str) -> Operation:
            return begin(float(engine.passed_on(tensors[0]).view(np.float32)[0]))

        def in_python(found: Any) -> Any:
            begin(float(found)).wait()
            return found

        handles = [] if self._is_on_device else [plain.handle for plain in self._living()]
        if not engine.problem():
            return engine.compare(engine.Call(start, None), value, handles, "compared")
        # TensorFlow orders operations on a variable, and so everything between two reads of it.
        with tf.control_dependencies([tf.raw_ops.VarIsInitializedOp(resource=handle) for handle in handles]):
            over = tf.numpy_function(in_python, [value], tf.float32, stateful=True)
        return engine.held([over], [over], self._living())[0]

    def start_rows(self, lines: Sequence[str]) -> None:
        """Sends the row of a turn."""
        self._lines = lines
        if self._session.runtime is not self._runtime:  # graphs outlive a shutdown
            self.rows = self._make_rows()
            self._runtime = self._session.runtime
        if self.notices is not None:
            self.notices.steps += 1
        self.rows.start()

    def end_turn(self) -> None:
        """Ends the first turn."""
        with self.lock:
            self._turns.popleft()
            following = self._turns[0] if self._turns else None
        if following is not None:
            following.start()

    @property
    def is_waited_for(self) -> bool:
        """True if another turn waits for the first to end."""
        return len(self._turns) > 1

    def _living(self) -> list[Any]:
        variables = [reference() for reference in self._variables]
        for name, plain in zip(self._names, variables, strict=True):
            if plain is None:
                raise HorovodInternalError(
                    f"variable '{_short(name)}' is gone, and gradients of it are still averaged."
                )
        return variables

    # What is compared

    def _hyperparameters(self) -> Sequence[str]:
        return self._lines

    def _checksum(self, count: int) -> int:
        if self._is_on_device:
            return 0
        variables = self._living()
        kept: list[Any] = []

        def addresses(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
            kept[:] = [_in_memory(variables[row]) for row in rows]
            return np.array([address for address, _ in kept], np.uint64)

        return self._windows.checksum(addresses, range(count, count + 1)) if count else self._windows.whole(addresses)

    def _describe(self) -> list[str]:
        if self._is_on_device:
            return [f"'{_short(name)}' on a GPU" for name in self._names]
        kept = [_in_memory(plain) for plain in self._living()]
        sums = self._kernels.checksums(np.array([address for address, _ in kept], np.uint64), self._nbytes)
        return [
            f"'{_short(name)}' with checksum {sum:016x}" for name, sum in zip(self._names, sums.tolist(), strict=True)
        ]


class _Turn(Operation):
    """One comparison. Comparisons of the same variables, such as those of several graphs, come one after the other."""

    __slots__ = ("_comparison", "_error", "_has_begun", "_is_over", "_lines", "_listener")

    def __init__(self, comparison: Comparison, lines: Sequence[str]) -> None:
        super().__init__(None, lambda _: None)
        self._comparison, self._lines = comparison, lines
        self._has_begun = threading.Event()
        self._is_over = False
        self._error: Exception | None = None
        self._listener: Callable[[], None] | None = None

    def start(self) -> None:
        """Sends the row when no other turn is under way. An error is raised by ``wait``."""
        try:
            self._comparison.start_rows(self._lines)
        except Exception as error:
            self._end(error)
        with self._comparison.lock:
            self._has_begun.set()
            listener = self._listener
        if listener is not None:
            self._listen()

    def poll(self) -> bool:
        return self._is_over

    def notify(self, listener: Callable[[], None]) -> None:
        with self._comparison.lock:
            self._listener = listener
            has_begun = self._has_begun.is_set()
        if has_begun:
            self._listen()

    def wait(self) -> None:
        # Earlier turns have deadlines of their own, but an interrupted step may have left one that nobody ends.
        if not self._has_begun.wait(patience_s := self._comparison.patience_s):
            raise StallError(
                f"{self._comparison.what}: this comparison of the ranks has waited {patience_s:.0f} s for the end of "
                "an earlier one, which an interrupted step has left behind. Start the job again."
            )
        if not self._is_over:
            self._judge()
        if self._error is not None:
            raise self._error

    def _listen(self) -> None:
        if self._is_over:
            self._tell()
        else:
            self._comparison.rows.notify(self._hear)

    def _hear(self) -> None:
        """Called on the background thread, which must not wait for other ranks' descriptions."""
        if self._comparison.rows.says_nothing() and not self._comparison.is_waited_for:
            self._judge_and_tell()
        else:
            threading.Thread(target=self._judge_and_tell, name="comparison of ranks", daemon=True).start()

    def _judge_and_tell(self) -> None:
        self._judge()
        self._tell()

    def _judge(self) -> None:
        try:
            self._comparison.rows.finish()
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        self._error, self._is_over = error, True
        self._comparison.end_turn()

    def _tell(self) -> None:
        assert self._listener is not None
        self._listener()


def _short(name: str) -> str:
    """Returns the name without the position with which names on the wire begin."""
    return name.partition(".")[2] or name


def _is_on_device(plain: Any) -> bool:
    if _is_torch(plain):
        return plain.device.type != "cpu"
    return bool(plain.device) and tf.DeviceSpec.from_string(plain.device).device_type != "CPU"


def _nbytes(plain: Any) -> int:
    return int(plain.nbytes if _is_torch(plain) else plain.shape.num_elements() * plain.dtype.size)


def _in_memory(plain: Any) -> tuple[int, Any]:
    """Returns the address of a variable's elements, and what keeps them there: no copy if they are contiguous."""
    if _is_torch(plain):
        dense = plain.detach().contiguous()
        return dense.data_ptr(), dense
    tensor = tf.raw_ops.ReadVariableOp(resource=plain.handle, dtype=plain.dtype)
    if tensor.dtype == tf.bfloat16:  # which has no buffer protocol
        tensor = tf.bitcast(tensor, tf.uint16)
    array = np.asarray(memoryview(tensor))
    return array.__array_interface__["data"][0], array


# Keras' optimizers


def kind_of(optimizer: Any) -> str:
    """Returns what an optimizer's rounding depends on besides the processor: its class and, if it sums, its threads."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    name = type(inner).__name__
    if name in _ELEMENTWISE and inner.clipnorm is None and inner.global_clipnorm is None:
        return name
    return f"{name} with {_threads()} threads"


def options_of(optimizer: Any) -> list[str]:
    """Returns a line for each hyperparameter but the learning rate: the current values of its constructors'
    arguments.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    kind: Any = type(optimizer)
    values = ((name, spelled(getattr(optimizer, name, None))) for name in _arguments(kind))
    return [f"{name}={text}" for name, text in values if text is not None] + (
        [] if inner is None else options_of(inner)
    )


def rate_line(rate: float) -> str:
    """Returns the learning rate as a hyperparameter, as the shortest number that rounds to this float32."""
    return f"learning_rate={np.float32(rate)!s}"


@functools.cache
def _arguments(cls: Any) -> tuple[str, ...]:
    constructors = [vars(base)["__init__"] for base in cls.__mro__ if base is not object and "__init__" in vars(base)]
    names = {name for constructor in constructors for name in inspect.signature(constructor).parameters}
    return tuple(sorted(names.difference(_OTHERS)))


def _threads() -> int:
    return int(tf.config.threading.get_intra_op_parallelism_threads()) or len(os.sched_getaffinity(0))


def _way(kind: str, variables: Sequence[Any]) -> str:
    """Returns how the variables' new values are rounded, in words: equal words mean equal bits."""
    unit = platform.machine() + (" and a GPU" if any(map(_is_on_device, variables)) else "")
    if _is_torch(variables[0]):
        torch = sys.modules["torch"]
        return f"{kind} of torch {torch.__version__} on {unit} with {torch.backends.cpu.get_cpu_capability()}"
    how = "eager mode" if tf.executing_eagerly() else "graphs"
    return f"{kind or f'{_threads()} threads'} of TensorFlow {tf.version.VERSION} in {how} on {unit}"
