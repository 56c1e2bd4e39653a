"""The gradients of one step of a compressed optimizer: where an exchange reads them, and whether they change then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import NOTHING
from ocomm.kernels.device import Event
from ocomm.training.driver import Driver
from ocomm.types import DType, Flag
from ocomm_torch.backward.watched import WatchedGradient, release
from ocomm_torch.memory.decayed import DecayedParameters
from ocomm_torch.memory.masters import Masters
from ocomm_torch.memory.order import MemoryOrder
from ocomm_torch.memory.placement import OffloadedPlacement, Placement
from ocomm_torch.memory.tensor_memory import is_part, why_unreadable

#: The numbers of dtypes in kernels.
_LOW_DTYPES = {torch.float16: int(DType.FLOAT16), torch.bfloat16: int(DType.BFLOAT16)}


class Gradients:
    """Owns what is known of the gradients of the current step, by the index of their parameter.

    The exchange reads the memory of gradients from before ``step()`` to its end. ``locate`` gives it their addresses
    and keeps them alive; ``have_changed`` says in ``step()`` whether one was changed since, so that the step is
    exchanged again.

    Args:
        names: Of the parameters.
        tensors: The parameters; of a DTensor the tensor inside.
        orders: The memory order of each parameter.
        masters: The float32 masters.
        placement: Where the parameters and the state are.
        free: Whether gradients are released once they have been read.
    """

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        orders: Sequence[MemoryOrder],
        masters: Masters,
        placement: Placement,
        free: bool,
    ) -> None:
        self._names, self._tensors, self._orders = names, tensors, orders
        self._masters, self._placement = masters, placement
        self.frees = free
        self._has_low = bool(masters.indices)
        #: Parameters that are dense, but not contiguous.
        self._reordered = {index for index, order in enumerate(orders) if order.axes is not None}
        #: The size of each gradient in float32, as the exchange reads it.
        self._nbytes = [4 * tensor.numel() for tensor in tensors]
        #: Each gradient that was counted or read; None for none.
        self.recorded: list[torch.Tensor | None] = [None] * len(tensors)
        #: The version of each gradient when it was read.
        self._versions = [0] * len(tensors)
        #: The address of each gradient when it was read; 0 for a sparse one.
        self._pointers = [0] * len(tensors)
        #: Keeps memory alive that the exchange reads, and that is no gradient.
        self.copies: list[torch.Tensor] = []
        #: Checksums of gradients that were widened before ``step()``, from when they were read.
        self._checksums = np.zeros(len(tensors), np.uint64)
        #: Checksums of posted gradients that have been used since, from before that use.
        self._used: dict[int, int] = {}
        #: Copies of gradients in the host's memory, and what is over when they are there, if the state is offloaded.
        self._fetched: dict[int, tuple[Event, torch.Tensor]] = {}
        #: Whether ``locate`` waits for such copies before ``step()``.
        self._awaits_copies = False
        #: The parameters whose gradients of this step are released.
        self._freed: set[int] = set()
        #: The parameters that the exchange reads before ``step()``. Nobody but ocomm writes to masters.
        self.decayed = DecayedParameters(tensors, self._parameter_checksums)
        self._unmastered = [m is t for m, t in zip(masters.stepped, tensors, strict=True)]

    def connect(self, driver: Driver) -> None:
        """Serves the steps of ``driver`` from now on."""
        self._driver, self._stepper = driver, driver.stepper

    def forget(self) -> None:
        """Ends the step."""
        release(self.recorded)
        self._used.clear()
        self.copies.clear()
        self._fetched.clear()
        self._freed.clear()
        if self.decayed.noted:
            self.decayed.forget()
        if self.frees:
            for tensor in self._tensors:
                tensor.grad = None
        self.recorded[:] = [None] * len(self.recorded)

    # What the exchange reads

    def locate(self, tensors: list[int], final: bool) -> list[int] | None:
        """Returns the addresses of gradients as dense float32 in the order of their parameters, 0 for none; None if one
        is not ready.

        What is read is kept alive until the step is over. Before ``step()`` a gradient that would have to be copied is
        not ready, because a copy would not show a later change. One that has to be widened is ready, because its
        checksum is kept. Kernels on a device read 16 bits directly.
        """
        if self._placement.offloads:
            return self._locate_fetched(tensors, final)
        if not final and self._driver.is_decay_coupled:
            self.decayed.read([i for i in tensors if self._unmastered[i]], self._stepper.buckets.verified_part)
        parameters, recorded, versions, pointers = self._tensors, self.recorded, self._versions, self._pointers
        float32, reordered, nbytes = torch.float32, self._reordered, self._nbytes
        if final:
            release(recorded)
        addresses = tensors[:]  # a list of that length
        others: list[int] = []
        old: list[int] = []
        for place, index in enumerate(tensors):
            grad = recorded[index]
            if final:
                grad = recorded[index] = parameters[index].grad
            address = 0
            if grad is not None:
                versions[index] = grad._version
                try:  # cheaper than looking at the layout first
                    if (
                        grad.dtype is float32
                        and index not in reordered
                        and grad.is_contiguous()
                        and not grad.is_neg()
                        and grad.nbytes == nbytes[index]
                    ):
                        address = pointers[index] = grad.data_ptr()
                        if not address:
                            self._check_gradient(index, grad)
                        if versions[index] and not final:
                            old.append(index)
                    else:
                        others.append(place)
                except RuntimeError:  # a sparse tensor has no address
                    others.append(place)
            addresses[place] = address
        if others or self._placement.is_device:
            if not self._locate_others(tensors, addresses, others, final):
                return None
            self._placement.arrive()
            old += [tensors[place] for place in others if versions[tensors[place]] and not final]
        if old:
            self._keep_checksums(old)
        if self.frees:
            self._free(tensors)
        elif not final:
            for index in tensors:
                grad = recorded[index]
                if type(grad) is torch.Tensor:
                    grad.__class__ = WatchedGradient
        return addresses

    def _locate_fetched(self, tensors: list[int], final: bool) -> list[int] | None:
        """Does what ``locate`` does where gradients are copied to the host's memory: a gradient is ready once its copy
        is there.
        """
        missing = self._missing_copies(tensors, final)
        if missing is None:
            return None
        if missing:
            self._fetch(missing, final)
        if not self._copies_are_there(tensors, final):
            return None
        addresses = [self._address_of_copy(index) for index in tensors]
        if self.frees:
            for index in tensors:
                self.recorded[index] = None
        return addresses

    def _missing_copies(self, tensors: list[int], final: bool) -> dict[int, torch.Tensor] | None:
        """Returns the gradients that are to be copied to the host's memory, in the order of their parameters; None if
        one is not ready.
        """
        recorded, is_posted = self.recorded, self._stepper.buckets.is_posted
        if final:
            release(recorded)
        missing: dict[int, torch.Tensor] = {}
        for index in tensors:
            # What another bucket has posted may be read at this moment.
            if index in self._freed or (index in self._fetched and (not final or is_posted(index))):
                continue
            self._fetched.pop(index, None)
            if final:
                recorded[index] = self._tensors[index].grad
            if (grad := recorded[index]) is None:
                continue
            self._check_gradient(index, grad)
            self._check_dtype(index, grad)
            if not (self._has_its_size(index, grad, final) and (final or self._orders[index].has(grad))):
                return None
            missing[index] = self._orders[index].arranged(grad)
        return missing

    def _fetch(self, found: dict[int, torch.Tensor], final: bool) -> None:
        """Begins to copy gradients to the host's memory."""
        place = self._placement
        assert isinstance(place, OffloadedPlacement)
        for index, copied_from in found.items():
            grad = self.recorded[index]
            assert grad is not None
            self._versions[index], self._pointers[index] = grad._version, _pointer(grad)
            if copied_from is not grad:
                self.copies.append(copied_from)
            elif not final and not self.frees and type(grad) is torch.Tensor:
                grad.__class__ = WatchedGradient
        event = place.fetch(found)
        self._fetched.update({index: (event, place.fetched(index, grad)) for index, grad in found.items()})
        if self.frees:
            self._free(found)

    def _copies_are_there(self, tensors: list[int], final: bool) -> bool:
        """Returns whether all copies of gradients have arrived, after waiting for them where that is due."""
        place = self._placement
        assert isinstance(place, OffloadedPlacement)
        events = {id(event): event for event, _ in (self._fetched[i] for i in tensors if i in self._fetched)}
        for event in events.values():
            if final or self._awaits_copies:
                place.wait(event)
            elif not event.is_over():
                return False
        return True

    def _address_of_copy(self, index: int) -> int:
        if index not in self._fetched:
            return 0
        _, copy = self._fetched[index]
        return (copy if copy.dtype is torch.float32 else self._masters.widened(index, copy)).data_ptr()

    def post_copies(self) -> None:
        """Hands over what is on its way to the host, bucket by bucket, while the device computes the rest."""
        self._awaits_copies = True
        try:
            self._stepper.buckets.post_early()
        finally:
            self._awaits_copies = False

    def _free(self, tensors: Iterable[int]) -> None:
        """Takes gradients from their parameters. They live in ``recorded`` until they have been read."""
        for index in tensors:
            if self.recorded[index] is not None:
                self._freed.add(index)
                self._tensors[index].grad = None

    def drop_read(self) -> None:
        """Drops the gradients that the exchange has read for the last time."""
        for index in self._stepper.buckets.take_read():
            self.recorded[index] = None

    def require_freed(self) -> None:
        """Raises InvalidRequestError, and ends the optimizer, if a parameter whose gradient is released has another."""
        for index in self._freed:
            if self._tensors[index].grad is not None:
                error = InvalidRequestError(
                    f"'{self._names[index]}' has another gradient before step(), and that which free_gradients=True "
                    "has released is on its way: the sum of both is lost. For several backward passes in a step pass "
                    "backward_passes_per_step=N, or use no_sync() in all but the last; to give up a step call "
                    "zero_grad() of the optimizer."
                )
                self._stepper.give_up(error)
                raise error

    def _check_dtype(self, index: int, grad: torch.Tensor) -> None:
        """Raises InvalidRequestError for a gradient of another type than its parameter's and float32."""
        if grad.dtype is not torch.float32 and grad.dtype is not self._tensors[index].dtype:
            raise InvalidRequestError(
                f"gradient of '{self._names[index]}' is {grad.dtype}, expected {self._tensors[index].dtype} or "
                "torch.float32."
            )

    def _check_gradient(self, index: int, grad: torch.Tensor) -> None:
        """Raises InvalidRequestError for a gradient whose memory is not its own: its address, 0, would mean that there
        is none.
        """
        if reason := why_unreadable(grad):
            raise InvalidRequestError(
                f"gradient of '{self._names[index]}' {reason}. Set .grad to a plain tensor of shape "
                f"{tuple(grad.shape)}."
            )

    def _has_its_size(self, index: int, grad: torch.Tensor, final: bool) -> bool:
        """Returns False for a gradient of another size than that of its parameter when it was wrapped: the exchange
        would read memory behind it. If it is ``final``, raises InvalidRequestError. Before ``step()`` it is not ready,
        because ``step()`` looks at the parameter first, whose size has changed in most cases.
        """
        numel = self._nbytes[index] // 4
        if grad.numel() == numel:
            return True
        if final:
            raise InvalidRequestError(
                f"gradient of '{self._names[index]}' has shape {tuple(grad.shape)}, expected "
                f"{tuple(self._tensors[index].shape)}. Set .grad to a tensor of the parameter's shape, or to None."
            )
        return False

    def _keep_checksums(self, tensors: list[int]) -> None:
        """Keeps checksums of gradients with a history, which may be changed through a view, or an array of their
        memory, that is older than this step. Only for the host's memory, because a device would have to be waited for.
        """
        if self._stepper.buckets.verified_part != NOTHING:
            grads = {index: grad for index in tensors if (grad := self.recorded[index]) is not None}
            self._used.update(zip(grads, self._masters.checksums(grads).tolist(), strict=True))

    def _locate_others(self, tensors: list[int], addresses: list[int], others: list[int], final: bool) -> bool:
        """Locates the gradients at the positions ``others``, which are in 16 bits, or in another order than that of a
        contiguous tensor, or have gaps, or whose memory holds their negatives. Returns False if one is not ready.
        """
        low: dict[int, int] = {}
        as_they_are = self._placement.is_device and not self._driver.clipping.is_on
        widened: dict[int, torch.Tensor] = {}
        for place in others:
            index = tensors[place]
            grad = self.recorded[index]
            assert grad is not None
            self._check_gradient(index, grad)
            self._pointers[index] = _pointer(grad)
            is_wide = grad.dtype is torch.float32
            self._check_dtype(index, grad)
            if not is_wide and index not in self._masters and not final:
                return False  # its parameter was float32 when it was wrapped, which step() looks at first
            if not self._has_its_size(index, grad, final):
                return False
            if not self._orders[index].has(grad):
                if not final:
                    return False
                grad = self._orders[index].arranged(grad)
                self.copies.append(grad)
            if not is_wide and as_they_are:
                low[index] = _LOW_DTYPES[grad.dtype]
            elif not is_wide:
                widened[index] = grad
                grad = self._masters.widened(index, grad)
            addresses[place] = grad.data_ptr()
        if self._placement.is_device:
            column = self._driver.core.gradients["grad_dtype"]
            column[tensors] = 0
            column[list(low)] = list(low.values())
        if widened and not final and self._stepper.buckets.verified_part != NOTHING:
            self._checksums[list(widened)] = self._widened_checksums(widened)
        return True

    # What has changed

    def _parameter_checksums(self, indices: list[int], part: int) -> NDArray[np.uint64]:
        core = self._driver.core
        return core.kernels.checksums(core.tensors["param"][indices], 4 * core.layout.numels[indices], part)

    def used(self, gradients: Sequence[torch.Tensor]) -> None:
        """Called by ``Watcher``: keeps checksums of posted gradients before they may be changed. An older checksum is
        kept, because the gradient may have been changed since.
        """
        numbers = {
            id(grad): index for index, grad in enumerate(self.recorded) if grad is not None and index not in self._used
        }
        found = {numbers[id(grad)]: grad for grad in gradients if id(grad) in numbers}
        if found:
            self._used.update(zip(found, self._masters.checksums(found).tolist(), strict=True))

    def have_changed(self) -> bool:
        """Returns True if a posted gradient is another object, version or memory than when it was read, or has other
        bytes after it was used and nobody has said so.

        The stepper compares the bytes that it reads again; those of widened gradients are compared here.
        """
        release(self.recorded)
        parameters, recorded, versions, pointers = self._tensors, self.recorded, self._versions, self._pointers
        posted = [index for index in self._stepper.buckets.posted_tensors if index not in self._freed]
        strided = torch.strided
        for index in posted:
            grad = parameters[index].grad
            if grad is not recorded[index]:
                return True
            if grad is None:
                continue
            pointer = grad.data_ptr() if grad.layout is strided else 0
            if pointer != pointers[index]:
                return True
            # A part of one buffer of all gradients has the version of all. In the host's memory checksums tell then:
            # ``locate`` keeps those of gradients with a history.
            if grad._version != versions[index] and not (pointer and versions[index] and is_part(grad)):
                return True
        if self._stepper.objections & Flag.CHANGED:
            return False  # bytes, by a GradScaler, which leaves versions alone
        used = {index: recorded[index] for index in self._used.keys() & set(posted)} if self._used else {}
        if used and self._masters.checksums(used).tolist() != [self._used[index] for index in used]:
            return True
        if not self._has_low or self._stepper.buckets.verified_part == NOTHING:
            return False
        low = {index: recorded[index] for index in posted if index in self._masters}
        widened = {index: g for index, g in low.items() if g is not None and g.dtype is not torch.float32}
        if not widened:
            return False
        return bool((self._widened_checksums(widened) != self._checksums[list(widened)]).any())

    def _widened_checksums(self, gradients: dict[int, torch.Tensor]) -> np.ndarray:
        return self._masters.checksums(gradients, self._stepper.buckets.verified_part)

    def note_change(self) -> None:
        """Says that posted gradients have changed, so that ``step()`` exchanges them again."""
        if not self._stepper.begun:
            return
        posted = self._stepper.buckets.posted_tensors
        if not posted:
            self._fetched.clear()  # copies of what they were
            return
        self._stepper.object(Flag.CHANGED)
        release(self.recorded)
        self._fetched.clear()
        for index in posted:  # what the script changes after this is seen
            recorded, grad = self.recorded[index], self._tensors[index].grad
            if recorded is not None and grad is not None:
                self.copies.append(recorded)  # which the exchange reads
                self.recorded[index] = grad
                self._versions[index], self._pointers[index] = grad._version, _pointer(grad)

    def follow_ddp(self) -> None:
        """At the end of backward DDP has written its buckets, which nobody has changed, over the gradients, or has made
        the gradients views of them: what is on its way is what it was."""
        if not self._stepper.begun:
            return
        release(self.recorded)
        for index, recorded in enumerate(self.recorded):
            grad = self._tensors[index].grad
            if recorded is None or grad is None:
                continue
            if grad is not recorded:
                if grad.dtype is not recorded.dtype or not torch.equal(grad, recorded):
                    continue  # ``step`` sees it
                if self._stepper.buckets.is_posted(index):
                    self.copies.append(recorded)  # which the exchange reads
                self.recorded[index] = grad
            self._versions[index] = grad._version
            self._pointers[index] = _pointer(grad)
        for recorded in self.recorded:
            if type(recorded) is torch.Tensor:
                recorded.__class__ = WatchedGradient


def _pointer(grad: torch.Tensor) -> int:
    return grad.data_ptr() if grad.layout is torch.strided else 0
