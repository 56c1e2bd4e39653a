"""Declares every loop that kernels offer, once: its name, its arguments with their kinds, and its result.

``Loops`` is a protocol for type checkers and a table for everything else. From its annotations are made: the prototypes
in C, the functions in C that cut a loop into pieces for threads, the C engine's call for an operation of a plan (all
three by ``native/build.py``), the encoding of that operation (``collectives.native_engine``), the methods that call C
(``kernels.cpu``), the copies to a device and back (``collectives.staged``, ``kernels.device``), and the arguments of a
CUDA kernel (``kernels.cuda``). Written by hand are the declaration and the loop itself: in NumPy
(``kernels.reference``), in C and for CUDA.

docs/architecture.md says how to add a computation. This module is also read when the extension is built, where there is
neither NumPy nor ocomm, so it imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ocomm.types import Bytes
    from ocomm.types import DType as DType
    from ocomm.types import ReduceOp as ReduceOp

    # Arguments, by kind, which KINDS describes. `X | None` may be None.

    #: A BLOCK table, on whose blocks the loop works. It never changes.
    Blocks = NDArray[np.void]
    #: A RUN table, on whose runs the loop works. It never changes.
    Runs = NDArray[np.void]
    #: A PIECE table, on whose pieces the loop works. It never changes.
    Pieces = NDArray[np.void]
    #: A TENSOR table; it may change between calls.
    Tensors = NDArray[np.void]
    #: One NOISE row of the host, read when the loop runs.
    Noise = NDArray[np.void]
    #: Float32 elements in the kernels' memory, read.
    Floats = NDArray[np.float32]
    #: Float32 elements in the kernels' memory, written, and read if the loop says so.
    FloatsOut = NDArray[np.float32]
    #: Like Floats; its size is the number of elements to work on.
    Sized = NDArray[np.float32]
    #: Like FloatsOut; its size is the number of elements to work on.
    SizedOut = NDArray[np.float32]
    #: A few float32 numbers of the host, which never change.
    Weights = NDArray[np.float32]
    #: One bit per element of the flat buffers, 1 = masked. None: nothing is masked.
    Mask = Bytes
    #: "l1", the mean of absolute values, or "rms", the root of the mean square.
    Scale = str
    #: Staging memory that messages have filled, with signs and scales where the blocks say; read.
    Packed = Bytes
    #: Such memory of an earlier exchange, which a device has already; read.
    Gathered = Bytes
    #: Staging memory to which signs and scales are written where the blocks say.
    PackedOut = Bytes
    #: Staging memory of one message per worker: in rank order, or in the order of nodes in the hierarchical form.
    Messages = Sequence[Bytes]
    #: Staging memory with float32 elements where the runs say; read.
    Dense = Bytes
    #: Staging memory to which float32 elements are written where the runs say.
    DenseOut = Bytes
    #: Number of bits of an element's code: 16 is bfloat16; 8 and 4 are whole numbers, with a scale for each GROUP.
    CodeBits = int
    #: Staging memory with codes and scales where the blocks say, of so many bits; read.
    Codes = Bytes
    #: Staging memory to which codes and scales are written where the blocks say.
    CodesOut = Bytes
    #: Staging memory that is written as a whole.
    BufferOut = Bytes
    #: Memory for the sums of each row of a PIECE table.
    Sums = NDArray[Any]
    #: Numbers, by their type in C.
    Float32 = float
    Float64 = float
    Int64 = int
    Truth = bool

    # Results.

    #: True if everything that was computed is finite; in loops that compress with scales, these.
    Finite = bool
    #: Nothing; raises TypeError for an operation that the element type does not have.
    Supported: TypeAlias = None


class Loops(Protocol):
    """The loops. Arrays are one-dimensional and contiguous; nothing is allocated or kept.

    Buffers are indexed by a block's ``local``, ``owned``, ``offset`` or ``start``, which ``ocomm_block`` in
    ``native/ocomm.h`` describes. ``x_out`` is the new value of ``x``, and may be the same array.
    """

    # 1-bit Adam. Workers' ``values`` and errors are indexed by ``local``, servers' errors by ``owned``; ``denominator``
    # and ``out`` by ``offset``. A block of ``packed`` has a scale.

    def compress(
        self,
        blocks: Blocks,
        values: Floats,
        error: Floats,
        error_out: FloatsOut,
        mask: Mask | None,
        scale: Scale,
        packed: PackedOut,
    ) -> Finite:
        """Compresses c = values + error: signs and scale of c into ``packed``; error_out = c - scale * sign(c)."""
        ...

    def compress_momentum(
        self,
        blocks: Blocks,
        tensors: Tensors,
        previous: Gathered | None,
        error: Floats,
        error_out: FloatsOut,
        mask: Mask | None,
        scale: Scale,
        packed: PackedOut,
    ) -> Finite:
        """Compresses beta1 * m + one_minus_beta1 * (grad + weight_decay * param), like ``compress``.

        m is the tensor's dense momentum if its address is set, else the previous packed result, which may not be
        ``packed``.
        """
        ...

    def average(
        self,
        blocks: Blocks,
        received: Messages,
        origin: Int64,
        error: Floats,
        error_out: FloatsOut,
        mask: Mask | None,
        scale: Scale,
        packed: PackedOut,
    ) -> Finite:
        """Averages the messages of all workers, adds ``error``, and compresses the sum into ``packed``.

        Messages are summed in the order of ``received``: in rank order in the flat form. In the hierarchical form there
        is one worker per node, and the order is that of the nodes.

        A block's signs and scale are ``origin`` bytes closer to the start in a message than in ``packed``.
        """
        ...

    def unpack(self, blocks: Blocks, packed: Packed, mask: Mask | None, out: FloatsOut) -> None:
        """Writes out = scale * sign, 0 for masked elements."""
        ...

    def apply(self, blocks: Blocks, tensors: Tensors, packed: Gathered, denominator: Floats, mask: Mask | None) -> None:
        """Updates param = param * decay, then param -= (step_size * scale) * sign / denominator; masked elements only
        decay.

        In place, at the ``param`` addresses; tensors with ``skip`` are not changed.
        """
        ...

    # 0/1 Adam. Momentum, update and synced are flat, indexed by ``offset``.

    def compress_update(
        self,
        blocks: Blocks,
        tensors: Tensors,
        momentum: Floats,
        update: Floats | None,
        error: Floats,
        error_out: FloatsOut,
        mask: Mask | None,
        scale: Scale,
        packed: PackedOut,
    ) -> Finite:
        """Compresses the update of 0/1 Adam at a sync, like ``compress``: (1 / interval_root) * update + (step_size /
        interval_root) * m, with
        m = beta1 * momentum + one_minus_beta1 * (grad + weight_decay * param).

        ``update`` may be None: zeros. If interval_root is 0, both factors are.
        """
        ...

    def local_step(
        self,
        blocks: Blocks,
        tensors: Tensors,
        momentum: FloatsOut,
        update: FloatsOut | None,
        denominator: Floats,
        mask: Mask | None,
    ) -> None:
        """Makes 0/1 Adam's step without a sync, with g = grad + weight_decay * param and the param before the step.

        momentum = beta1 * momentum + one_minus_beta1 * g; param = param * decay, then
        param -= step_size * (momentum / denominator); update += step_size * momentum, unless it is None (step_size is
        0). The ``update`` of a masked element grows all the same, its momentum stays and its param only decays. Tensors
        with ``skip`` are not changed.
        """
        ...

    def apply_update(
        self,
        blocks: Blocks,
        tensors: Tensors,
        packed: Gathered,
        denominator: Floats,
        mask: Mask | None,
        momentum: FloatsOut,
        update: FloatsOut | None,
        synced: FloatsOut | None,
    ) -> None:
        """Ends 0/1 Adam's sync: param = synced * interval_decay - ((interval_root * scale) * sign) / denominator,
        momentum = (scale / interval_root) * sign, synced = param, update = 0.

        ``synced`` holds the params of the last sync; None: the params themselves are those. A masked element only
        decays and its momentum becomes 0. Tensors with ``skip`` are not changed.
        """
        ...

    # Tests for values that are not finite.

    def finite(self, blocks: Blocks, tensors: Tensors) -> Finite:
        """Returns whether every element of the blocks' gradients is finite. A gradient whose address is 0 is finite."""
        ...

    def finite_scales(self, blocks: Blocks, packed: Gathered) -> Finite:
        """Returns whether the scale of every block is finite. ``packed`` is in the host's memory, wherever the kernels
        are.
        """
        ...

    # Birder, SoftSignSGD and Lion. No scales, no mask. Workers' buffers are indexed by ``local``, servers' errors by
    # ``owned``, ``out`` and ``averages`` by ``offset``.

    def compress_quantized(
        self,
        blocks: Blocks,
        tensors: Tensors,
        momentum: Floats,
        momentum_out: FloatsOut,
        magnitude: Floats,
        magnitude_out: FloatsOut,
        error: Floats,
        error_out: FloatsOut,
        eps: Float32,
        amsgrad: Truth,
        noise: Noise,
        packed: PackedOut,
    ) -> Finite:
        """The worker's half: y = m / (b + eps) + e, sent as one random sign u per element, whose mean is y in [-1, 1].

        m = beta1 * momentum + one_minus_beta1 * grad; b = beta1 * magnitude + one_minus_beta1 * \\|grad\\|, with
        ``amsgrad`` no less than before; u = +1 iff U < (y + 1) / 2, U in [0, 1); error_out = y - u.
        Returns whether all m, b and y are finite.
        """
        ...

    def average_quantized(
        self,
        blocks: Blocks,
        received: Messages,
        origin: Int64,
        weights: Weights,
        error: Floats | None,
        error_out: FloatsOut | None,
        noise: Noise,
        packed: PackedOut,
    ) -> Finite:
        """The server's half: a = sum of weights[i] * u_i in order, plus error, sent as one random sign per element.

        error_out = a - that sign. Returns whether all a are finite. If both are None, no error is added and none is
        kept. With whole numbers as weights it is then a majority vote: of any sum but 0 the sign is sent, of 0 either
        one. ``origin`` is that of ``average``.
        """
        ...

    def compress_signs(
        self,
        blocks: Blocks,
        tensors: Tensors,
        momentum: Floats,
        momentum_out: FloatsOut,
        beta2: Float32,
        one_minus_beta2: Float32,
        zero_up: Truth,
        packed: PackedOut,
    ) -> Finite:
        """The worker's half of Lion: the signs of c = beta1 * momentum + one_minus_beta1 * grad, for 0 as ``zero_up``
        says.

        momentum_out = beta2 * momentum + one_minus_beta2 * grad. Returns whether all of both are finite.
        """
        ...

    def apply_signs(self, blocks: Blocks, tensors: Tensors, packed: Gathered) -> None:
        """Updates param = param * decay, then param -= step_size * sign; tensors with ``skip`` are not changed."""
        ...

    def soft_sign(
        self,
        blocks: Blocks,
        tensors: Tensors,
        momentum: Floats,
        momentum_out: FloatsOut,
        magnitude: Floats,
        magnitude_out: FloatsOut,
        eps: Float32,
        amsgrad: Truth,
        out: FloatsOut,
    ) -> Finite:
        """Writes out = m / (b + eps), with m and b of ``compress_quantized``. Returns whether all of them are
        finite.
        """
        ...

    # Dense values in 16, 8 or 4 bits. Workers' errors are indexed by ``local``, servers' by ``owned``, ``out`` by
    # ``offset``. The elements of a block from its ``bits`` on are bfloat16, or whole numbers q of 8 or 4 bits, the
    # first in the lowest bits, in two's complement. These stand for q * s, where each GROUP elements share a float32
    # scale s, from the block's ``scale`` on: s = max(abs(c)) / 127, or / 7 with 4 bits; q = c / s, rounded to the
    # nearest, of two the even one, where c / s is c * (127 / max(abs(c))). If no abs(c) is at least LEAST, s and all q
    # are 0. If a c is not finite, s is NaN and all q are 0.

    def compress_codes(
        self,
        blocks: Blocks,
        tensors: Tensors,
        error: Floats | None,
        error_out: FloatsOut | None,
        bits: CodeBits,
        packed: CodesOut,
    ) -> Finite:
        """The worker's half: sends the codes of c = grad + error; error_out = c less what they stand for.

        Both errors may be None: c is the gradient, and what rounding loses is lost. A gradient whose address is 0
        counts as zeros. Returns whether all that is sent is finite.
        """
        ...

    def average_codes(
        self,
        blocks: Blocks,
        received: Messages,
        origin: Int64,
        error: Floats | None,
        error_out: FloatsOut | None,
        bits: CodeBits,
        packed: CodesOut,
    ) -> Finite:
        """The server's half: averages all ranks' messages in rank order, adds the error, and sends codes of that.

        Errors, ``origin`` and the answer are those of ``compress_codes`` and ``average``.
        """
        ...

    def unpack_codes(self, blocks: Blocks, packed: Codes, bits: CodeBits, out: FloatsOut) -> None:
        """Writes what the codes stand for."""
        ...

    # Dense values.

    def descend(self, blocks: Blocks, tensors: Tensors, averages: FloatsOut) -> None:
        """Updates param = param * decay, then param -= step_size * averages, indexed by ``offset``.

        Tensors with ``skip`` are not changed. ``averages`` is overwritten.
        """
        ...

    def adam_step(
        self,
        blocks: Blocks,
        tensors: Tensors,
        gradients: Floats,
        momentum: FloatsOut,
        variance: FloatsOut,
        scale: Float32,
        rest1: Float32,
        beta2: Float32,
        rest2: Float32,
        root: Float32,
        eps: Float32,
    ) -> None:
        """Makes Adam's step in the arithmetic of ``torch.optim.Adam``; parameters, momentum and variance in place.

        g = gradients * scale + weight_decay * param; param = param * decay; m = m + rest1 * (g - m);
        v = v * beta2 + (rest2 * g) * g; param -= step_size * (m / (sqrt(v) / root + eps)), with rest = 1 - beta and
        root = sqrt(1 - beta2^t). Gradients, momentum and variance are indexed by ``owned``. For dense steps
        (``optim.adam``). ``adam_update`` rounds differently.
        """
        ...

    def gather(self, runs: Runs, tensors: Tensors, destination: DenseOut) -> None:
        """Copies the gradient elements of each run into ``destination``; zeros for a tensor without a gradient."""
        ...

    def scatter(self, runs: Runs, tensors: Tensors, source: Dense) -> None:
        """Copies the elements of ``source`` to the addresses of the tensors' gradients."""
        ...

    def reduce(
        self,
        dtype: DType,
        op: ReduceOp,
        sources: Messages,
        prescale: Float64,
        postscale: Float64,
        out: BufferOut,
    ) -> Supported:
        """Writes out = postscale * reduce(prescale * sources[0], prescale * sources[1], ...), elementwise in rank
        order.

        16-bit floats are computed in float32. Inputs and output are raw bytes; ``out`` may be one of the sources.
        """
        ...

    # 1-bit LAMB. Factors are float64, and values computed from them are rounded to float32 once. c = 1 / (1 -
    # beta^step).

    def axpy(self, y: SizedOut, x: Floats, factor: Float32) -> None:
        """Updates y += factor * x."""
        ...

    def adam_update(
        self,
        gradient: Sized,
        momentum: FloatsOut,
        variance: FloatsOut,
        update: FloatsOut,
        beta1: Float64,
        beta2: Float64,
        eps: Float32,
        step: Int64,
    ) -> None:
        """Makes Adam's step ``step``, counted from 1, without the parameter; momentum and variance in place.

        m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * (g * g);
        update = c1 * m / (sqrt(v * c2) + eps). ``adam_step`` rounds differently.
        """
        ...

    def lamb_update(
        self,
        blocks: Blocks,
        packed: Gathered,
        previous: Gathered | None,
        dense: Floats | None,
        mask: Mask | None,
        floors: Floats,
        denominator: Floats,
        fresh: FloatsOut,
        update: FloatsOut,
        largest: FloatsOut,
        beta1: Float64,
        beta2: Float64,
        eps: Float32,
        step: Int64,
    ) -> None:
        """Makes 1-bit LAMB's step ``step`` of blocks of one tensor, without the parameter, with m = scale * sign as
        packed.

        g = (m - beta1 * before) * (1 / (1 - beta1)); fresh = beta2 * fresh + (1 - beta2) * (g * g);
        update = c1 * m / denominator; largest = maximum over a block's elements of
        denominator / (max(sqrt(fresh * c2), floor) + eps).

        ``before`` is the packed ``previous`` or, if that is None, ``dense``, indexed by ``start`` as ``update`` is.
        ``floors`` and ``largest`` have one number per block; ``denominator`` and ``fresh`` are flat. A masked element's
        m, before and update are 0, and it is in no maximum.
        """
        ...

    # Sums over memory, for ``Kernels.sums``, and on devices for ``Kernels.checksums``, ``squares`` and ``sketch``.

    def sum_floats(self, pieces: Pieces, sums: Sums) -> None:
        """Computes the sum of each piece: lane k of 256 adds elements k, k + 256, ...; then lanes are folded by
        halves.
        """
        ...

    def sum_words(self, pieces: Pieces, sums: Sums) -> None:
        """Computes what each piece adds to a full ``checksum``; elements are words of 8 bytes."""
        ...

    def sum_squares(self, pieces: Pieces, sums: Sums) -> None:
        """Computes the sum of squares of each piece, in float64 and in any order; elements are float32."""
        ...

    def sum_buckets(self, pieces: Pieces, sums: Sums) -> None:
        """Computes the SKETCH sums of each piece, a chunk of ``Kernels.sketch``; elements are float32."""
        ...


#: Loops that are not in C, and why. Kernels on the host run the reference's.
NOT_IN_C = {
    "descend": "NumPy's operations on whole blocks are loops in C already",
    "sum_words": "the host has ocomm_checksums",
    "sum_squares": "the host has ocomm_squares",
    "sum_buckets": "the host has ocomm_sketch",
}
#: Loops that have no CUDA kernel, and why.
NOT_ON_DEVICES = {
    "finite_scales": "what was gathered is in the host's memory",
    **dict.fromkeys(("axpy", "adam_update", "lamb_update"), "1-bit LAMB trains what is in the host's memory alone"),
}


class ArgumentKind(NamedTuple):
    """How the arguments of one kind are passed on.

    - ``c``: (type, name) of its parameters in C; ``{}`` stands for the argument's name.
    - ``form``: how these are made from the argument, a key of FORMS.
    - ``device``: what a loop on a device gets: the copy of a "table" that never changes, or of the "rows" of one as
      they are now; the "twins" of several pieces of staging memory, or the "twin" of one (of a device's own array: that
      array); or the argument "itself".
    - ``staged``: in a plan, whether "all" of some staging memory is copied to the device before the loop, or what is
      "missing" there, or whether the loop has "written" it. Runs are "cut".
    - ``by``: the kind of the table that says where in it the elements are.
    """

    c: tuple[tuple[str, str], ...]
    form: str
    device: str = "twin"
    staged: str = ""
    by: str = ""


class Form(NamedTuple):
    """Python expressions for the parameters in C; ``{}`` stands for the argument.

    ``called``: for cffi, where ``{pointer}`` stands for a pointer to the elements. ``encoded``: as numbers, for the
    operation of a plan.
    """

    called: tuple[str, ...]
    encoded: tuple[str, ...]


FORMS = {
    "array": Form(("{pointer}",), ("address({})",)),
    "rows": Form(("{pointer}", "len({})"), ("address({})", "len({})")),
    "arrays": Form(
        ("new('uint8_t *[]', [pointer('uint8_t[]', x) for x in {}])", "len({})"), ("pointers({})", "len({})")
    ),
    "scale": Form(("{} == 'rms'",), ("{} == 'rms'",)),
    "number": Form(("{}",), ("{}",)),
}

_READ, _WRITTEN = (("const float *", "{}"),), (("float *", "{}"),)
_BYTES, _BYTES_OUT = (("const uint8_t *", "{}"),), (("uint8_t *", "{}"),)
KINDS = {
    "Blocks": ArgumentKind((("const ocomm_block *", "{}"), ("int64_t", "count")), "rows", "table"),
    "Runs": ArgumentKind((("const ocomm_run *", "{}"), ("int64_t", "count")), "rows", "table", "cut"),
    "Pieces": ArgumentKind((("const ocomm_piece *", "{}"), ("int64_t", "count")), "rows"),
    "Tensors": ArgumentKind((("const ocomm_tensor *", "{}"),), "array", "rows"),
    "Noise": ArgumentKind((("const ocomm_noise *", "{}"),), "array", "itself"),
    "Floats": ArgumentKind(_READ, "array"),
    "FloatsOut": ArgumentKind(_WRITTEN, "array"),
    "Sized": ArgumentKind((*_READ, ("int64_t", "numel")), "rows"),
    "SizedOut": ArgumentKind((*_WRITTEN, ("int64_t", "numel")), "rows"),
    "Weights": ArgumentKind(_READ, "array", "table"),
    "Mask": ArgumentKind(_BYTES, "array"),
    "Scale": ArgumentKind((("int", "rms"),), "scale", "itself"),
    "Packed": ArgumentKind(_BYTES, "array", staged="all", by="Blocks"),
    "Gathered": ArgumentKind(_BYTES, "array", by="Blocks"),
    "PackedOut": ArgumentKind(_BYTES_OUT, "array", staged="written", by="Blocks"),
    "Messages": ArgumentKind((("const uint8_t *const *", "{}"), ("int", "ranks")), "arrays", "twins", "missing"),
    "Dense": ArgumentKind(_BYTES, "array", staged="missing", by="Runs"),
    "DenseOut": ArgumentKind(_BYTES_OUT, "array", staged="written", by="Runs"),
    "CodeBits": ArgumentKind((("int", "{}"),), "number", "itself"),
    "Codes": ArgumentKind(_BYTES, "array", staged="missing", by="Blocks"),
    "CodesOut": ArgumentKind(_BYTES_OUT, "array", staged="written", by="Blocks"),
    "BufferOut": ArgumentKind((*_BYTES_OUT, ("int64_t", "nbytes")), "rows", staged="written"),
    "Sums": ArgumentKind((("float *", "{}"),), "array"),
    "Float32": ArgumentKind((("float", "{}"),), "number", "itself"),
    "Float64": ArgumentKind((("double", "{}"),), "number", "itself"),
    "Int64": ArgumentKind((("int64_t", "{}"),), "number", "itself"),
    "Truth": ArgumentKind((("int", "{}"),), "number", "itself"),
    "DType": ArgumentKind((("int", "{}"),), "number", "itself"),
    "ReduceOp": ArgumentKind((("int", "{}"),), "number", "itself"),
}
#: What C returns. For Finite and Supported: 1 for yes, 0 for no.
ANSWERS = {"None": "void", "Finite": "int", "Supported": "int"}


class Argument(NamedTuple):
    """One argument of a loop. ``optional``: it may be None."""

    name: str
    kind: str
    optional: bool

    @property
    def c(self) -> list[tuple[str, str]]:
        """(type, name) of its parameters in C."""
        return [(c_type, name.format(self.name)) for c_type, name in KINDS[self.kind].c]

    def called(self) -> list[str]:
        """Returns expressions for the arguments of cffi, with ``new``, ``pointer`` and ``NULL``."""
        words = self.c[0][0].replace("const ", "").rstrip(" *")
        pointer = f"pointer('{words}[]', {self.name})"
        if self.optional:
            pointer = f"NULL if {self.name} is None else {pointer}"
        form = FORMS[KINDS[self.kind].form]
        return [expression.format(self.name, pointer=pointer) for expression in form.called]

    def encoded(self) -> list[str]:
        """Returns expressions for the numbers of an operation, with ``address`` and ``pointers``."""
        return [expression.format(self.name) for expression in FORMS[KINDS[self.kind].form].encoded]


class Declaration(NamedTuple):
    """One loop. ``names`` are those of its arguments. ``reports``: it says whether everything was finite. ``code``: its
    number in the engine if it is in C, else -1.
    """

    name: str
    arguments: tuple[Argument, ...]
    names: tuple[str, ...]
    answer: str
    reports: bool
    code: int

    @property
    def c(self) -> list[tuple[str, str]]:
        """(type, name) of all parameters in C, after the pool."""
        return [parameter for argument in self.arguments for parameter in argument.c]

    def has(self, kind: str) -> bool:
        """Returns True if an argument is of this kind."""
        return any(argument.kind == kind for argument in self.arguments)

    @property
    def slots(self) -> int:
        """The number of numbers in its operation: its parameters, and the address of the flags."""
        return len(self.c) + self.reports


#: Smaller codes are operations of the engine that are not loops.
FIRST_CODE = 16


def declarations(protocol: type = Loops, not_in_c: Iterable[str] = tuple(NOT_IN_C)) -> dict[str, Declaration]:
    """Returns the loops of a protocol, by name. Raises TypeError, which names the loop, for a mistake in one of
    them.
    """
    methods = {name: method for name, method in vars(protocol).items() if inspect.isfunction(method) and name[0] != "_"}
    unknown = sorted(set(not_in_c) - set(methods))
    if unknown:
        raise TypeError(f"not in C, and not declared either: {', '.join(unknown)}")
    found, code = {}, FIRST_CODE
    for name, method in methods.items():
        declaration = _declaration(name, method, -1 if name in not_in_c else code)
        code += declaration.code >= 0
        found[name] = declaration
    return found


def _declaration(name: str, method: Any, code: int) -> Declaration:
    signature = inspect.signature(method)
    arguments = []
    for parameter in list(signature.parameters.values())[1:]:
        kind, _, none = str(parameter.annotation).partition(" | ")
        where = f"loop {name!r}, argument {parameter.name!r}"
        if kind not in KINDS or none not in ("", "None"):
            raise TypeError(f"{where}: no kind {parameter.annotation!r}; there are {', '.join(KINDS)}, and X | None")
        if none and KINDS[kind].form != "array":
            raise TypeError(f"{where}: {kind} cannot be None")
        if parameter.kind != parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty:
            raise TypeError(f"{where}: every call gives every argument, in this order; no defaults, no stars")
        arguments.append(Argument(parameter.name, kind, bool(none)))
    if signature.return_annotation not in ANSWERS:
        raise TypeError(f"loop {name!r} answers {signature.return_annotation!r}; it may be {', '.join(ANSWERS)}")
    answer = signature.return_annotation
    called = tuple(argument.name for argument in arguments)
    declaration = Declaration(name, tuple(arguments), called, answer, answer == "Finite", code)
    kinds = [argument.kind for argument in arguments]
    for argument in arguments:
        table = KINDS[argument.kind].by
        if table and kinds.count(table) != 1:
            raise TypeError(f"loop {name!r}: {table} say where {argument.name!r} has its elements; there must be one")
    names = [parameter for _, parameter in declaration.c]
    twice = sorted({parameter for parameter in names if names.count(parameter) > 1})
    if twice:
        raise TypeError(f"loop {name!r}: two parameters in C are called {', '.join(twice)}")
    return declaration


LOOPS = declarations()
#: Loops in C.
IN_C = [declaration for declaration in LOOPS.values() if declaration.code >= 0]
#: Number of numbers that an operation can hold; operations that are not loops need at most 9.
SLOTS = max(9, *(declaration.slots for declaration in IN_C))
#: A 60-bit hash of the declarations of the loops in C: their names, codes, arguments and types, and ``SLOTS``. The
#: structs of native/ocomm.h are not part of it.
DIGEST = int(hashlib.sha256(repr((IN_C, [d.c for d in IN_C], SLOTS)).encode()).hexdigest()[:15], 16)


def function(name: str, parameters: Iterable[str], returns: str, names: Mapping[str, Any]) -> Any:
    """Returns a function that evaluates an expression of its ``parameters`` and of ``names``, as fast as a written
    one.
    """
    source = f"def {name}({', '.join(parameters)}):\n    return {returns}\n"
    made: dict[str, Any] = {}
    exec(compile(source, f"<{name}, made of its declaration in {__name__}>", "exec"), dict(names), made)
    return made[name]
