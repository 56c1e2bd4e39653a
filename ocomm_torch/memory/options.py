"""Where an optimizer for Torch has its state, and how long gradients live: options that change no bit of a step."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ocomm.errors import InvalidRequestError
from ocomm.optim.options import Options, option
from ocomm.training.common import Common


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """The options of memory. Raises InvalidRequestError for impossible values."""

    offload: bool | str | os.PathLike[str] = option(  # noqa: RUF009, a path is not changed
        False,
        """True: if the parameters are on a GPU, all state of the optimizer is in the host's memory and the host makes
        the steps, so that the GPU has parameters, gradients and activations alone (docs/memory.md). A folder: the same,
        and the state is in mapped files there, for parameters in the host's memory, too.""",
        agree=False,
    )
    free_gradients: bool = option(
        False,
        """Release each gradient during backward, once the exchange has read it; after ``step()`` all are None. Not with
        a GradScaler or exact clipping (docs/memory.md).""",
        agree=False,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.offload, (bool, str, os.PathLike)):
            raise InvalidRequestError(f"offload must be True, False or a folder, got {self.offload!r}")
        if not isinstance(self.free_gradients, bool):
            raise InvalidRequestError(f"free_gradients must be True or False, got {self.free_gradients!r}")

    def check(self, name: str, common: Common, is_on_device: bool, has_dtensors: bool) -> None:
        """Raises InvalidRequestError for what does not go together.

        Args:
            name: The optimizer's name, for messages.
            common: Its options.
            is_on_device: Whether the parameters are on a GPU.
            has_dtensors: Whether some of them are DTensors.
        """
        offloads = is_on_device and self.offload is not False
        if has_dtensors and (offloads or self.free_gradients):
            which = "offload" if offloads else "free_gradients"
            raise InvalidRequestError(
                f"{name}: {which} is for plain parameters, and there are DTensors, whose memory is fully_shard's: use "
                "its CPUOffloadPolicy."
            )
        if not self.free_gradients:
            return
        why = ""
        if not common.overlap:
            why = "needs overlap=True: without it no gradient is read before backward is over"
        elif common.max_grad_norm is not None and common.clip == "exact":
            why = (
                "cannot clip exactly, because the norm of all gradients must be known before the first is sent: pass "
                "clip='previous' with offload=True, or no max_grad_norm"
            )
        elif common.max_grad_norm is not None and not offloads:
            why = (
                "has no norm to clip by, which is that of all gradients at the end of a step: offload=True on a GPU "
                "keeps copies of them; else pass no max_grad_norm"
            )
        elif is_on_device and not offloads:
            why = (
                "on a GPU needs offload=True: whether a gradient was finite is asked at the end of a dense step, and "
                "the host would have to wait for the GPU to know it before"
            )
        if why:
            raise InvalidRequestError(f"{name}: free_gradients=True {why}.")
