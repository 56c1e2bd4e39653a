"""1-bit Adam for Keras 3: wraps ``keras.optimizers.Adam`` or ``AdamW``, and makes its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.onebit_adam import OneBitAdam
from ocomm.training.onebit_adam import OneBitAdamDriver
from ocomm_tf.keras.compressed import ADAM, GOES_ON, CompressedAdam, optimizer_face, require_adam, wrap


class _OneBitAdam(CompressedAdam):
    ocomm_core = OneBitAdam
    ocomm_driver = OneBitAdamDriver

    #: The step after which ``gather_moments`` was called last.
    _gathered_at: int | None = None

    def gather_moments(self: Any) -> None:
        """Puts m and v of a warm-up with ``shard_state`` together in the optimizer's variables, on every rank, so that
        one rank can save the model before the next step. Collective; does nothing if there are no shards.
        """
        frontend, driver = self._frontend, self._driver()
        for number, momentum, variance in driver.gathered_moments() if driver is not None else ():
            entry = frontend.entries[number]
            self._momentums[entry.index].assign(entry.from_wire(momentum))
            self._velocities[entry.index].assign(entry.from_wire(variance))
        if driver is not None:
            self._note_moments(int(self.iterations.numpy()))
        self.__dict__["_gathered_at"] = None if driver is None else driver.steps

    def _driver(self: Any) -> OneBitAdamDriver | None:
        return None if self._frontend is None else self._frontend.driver

    def _restore_moments(self: Any, saved: Mapping[str, Any], counts: Sequence[int]) -> None:
        self.__dict__["_gathered_at"] = None
        super()._restore_moments(saved, counts)

    @property
    def _is_partial(self: Any) -> bool:
        driver = self._driver()
        return driver is not None and driver.has_shards and self._gathered_at != driver.steps

    def _prepare_save(self: Any) -> None:
        if self._is_partial:
            raise InvalidRequestError(
                f"{self._driver().name}: with shard_state each rank has its part of m and v until the warm-up is over, "
                "so this one cannot save the optimizer alone. Call optimizer.gather_moments() on all ranks after the "
                "last step and before the save, or save the model without its optimizer (include_optimizer=False)."
            )
        super()._prepare_save()


@optimizer_face(OneBitAdam, goes_on=GOES_ON, optimizer=ADAM)
def DistributedOneBitAdam(
    optimizer: Any,
    variables: Any = None,
    *,
    warm_start: bool = False,
    names: Mapping[str, Any] | None = None,
    process_set: ProcessSet = global_process_set,
    **arguments: Any,
) -> Any:
    """Wraps Adam for data-parallel 1-bit Adam (arXiv 2102.02888): Adam at first, then 1 bit per variable element and
    direction.

    Steps follow Torch's formula, which adds epsilon to sqrt(v_hat) and counts the steps of each variable, not those of
    the optimizer. They are collective.
    """
    require_adam(optimizer, "DistributedOneBitAdam")
    return wrap(_OneBitAdam, optimizer, variables, names, process_set, arguments, warm_start)
