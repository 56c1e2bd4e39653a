"""Grids: ocomm has the data axis of a torch ``DeviceMesh``, and torch every other axis.

Torch divides a model among ranks: pipeline stages, tensor-parallel shards, shards of ``fully_shard``. A rank's part is
local tensors, plain or inside DTensors. The ranks whose coordinates on all other axes are equal have the same part:
they are a process set, in which a 1-bit optimizer exchanges the gradients of local tensors. The ranks of one data
coordinate, which have all parts of one replica, then agree on the step (``ocomm.optim.grid``).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ocomm import api
from ocomm import session as sessions
from ocomm.agreement import gather
from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet
from ocomm.optim.grid import Grid
from ocomm.session import Session
from ocomm_torch.memory.tensor_memory import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("ocomm")


def init_device_mesh(
    axes: Mapping[str, int], *, device_type: str | None = None, backend: str | None = None
) -> DeviceMesh:
    """Starts torch.distributed among the ranks of the job, and makes a mesh of them. Collective over all ranks.

    ``init()`` is called if it was not. The ranks meet by MPI, so no variable of Torch's has to be set. A process group
    that the script has made already is used.

    Args:
        axes: The size of each axis by its name, the slowest first: ranks that differ only in the last axis are
            neighbours. ``{"pp": 2, "dp": 2, "tp": 2}``, for instance.
        device_type: ``"cpu"`` or ``"cuda"``; None for ``"cuda"`` where Torch has a GPU.
        backend: The backend of Torch's process groups; None for gloo on CPUs, and gloo and nccl on GPUs.

    Returns:
        Torch's mesh, for ``fully_shard(model, mesh=mesh["fsdp"])``, ``PipelineStage(..., group=mesh.get_group("pp"))``,
        and for the 1-bit optimizers: ``mesh=mesh, data="dp"``.

    Raises:
        InvalidRequestError: The product of the sizes is not the number of ranks, Torch's process group is of other
            ranks, or this Torch has no meshes.
    """
    if not hasattr(dist, "init_device_mesh"):
        raise InvalidRequestError(f"torch {torch.__version__} has no init_device_mesh; use torch 2.3 or later.")
    if not api.is_initialized():
        api.init()
    size, rank = api.size(), api.rank()
    said = ", ".join(f"{name}={count}" for name, count in axes.items())
    if not axes or any(not isinstance(count, int) or count < 1 for count in axes.values()):
        raise InvalidRequestError(f"init_device_mesh takes one or more axes with positive sizes, got {said or 'none'}.")
    if math.prod(axes.values()) != size:
        raise InvalidRequestError(
            f"a mesh of {said} has {math.prod(axes.values())} ranks, and the job has {size}: start it with ocommrun "
            f"-np {math.prod(axes.values())}, or choose other sizes."
        )
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        backend = backend or ("gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl")
        dist.init_process_group(backend, init_method="ocomm://")
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise InvalidRequestError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} of torch.distributed and rank {rank} "
            f"of {size} of ocomm's job. Leave RANK and WORLD_SIZE to the launcher."
        )
    return dist.init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def nccl_user(mesh: DeviceMesh, data: str) -> str:
    """Returns which axis of the mesh, beside ``data``, torch uses NCCL for, in words; "" for none."""
    for name, size in zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True) if dist.is_initialized() else ():
        if name != data and size > 1 and "nccl" in str(dist.get_backend_config(mesh.get_group(name))):
            return f"torch's axis '{name}' of the mesh"
    return ""


class DataAxis(ProcessSet):
    """The ranks that have this rank's part of the model: a process set, and its place in the grid ``mesh``.

    Making one is collective over all ranks, which register the sets of all parts.
    """

    def __init__(self, mesh: DeviceMesh, data: str) -> None:
        session = sessions.current()
        topology = session.require_topology()
        names = mesh.mesh_dim_names or ()
        if data not in names:
            raise InvalidRequestError(f"data={data!r} is no axis of the mesh, which has {list(names)}.")
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(topology.size)):
            raise InvalidRequestError(
                f"the mesh has ranks {ranks}, and ocomm's job has 0 to {topology.size - 1}: pass the whole mesh of "
                "this job, in the order in which init_device_mesh makes it, not a part of it."
            )
        self.mesh, self.data = mesh, data
        self._axis = names.index(data)
        parts = mesh.mesh.movedim(self._axis, -1).reshape(-1, mesh.mesh.shape[self._axis]).tolist()
        super().__init__(next(part for part in parts if topology.rank in part))
        #: The ranks with this rank's data coordinate, one of each part.
        replicas = [list(replica) for replica in zip(*parts, strict=True)]
        self.replica: list[int] = next(replica for replica in replicas if topology.rank in replica)
        #: For each of these ranks, its coordinates on axes of stages, as found by ``grid``: equal ones are one stage.
        self.stages: dict[int, dict[str, int]] = {}
        for members in (*parts, *replicas):
            if tuple(members) not in session.set_ranks.values():
                session.registry.add(members)
        session.other_nccl = session.other_nccl or nccl_user(mesh, data)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of a rank by axis."""
        place = (self.mesh.mesh == rank).nonzero()[0].tolist()
        return dict(zip(self.mesh.mesh_dim_names or (), place, strict=True))

    def place(self, rank: int) -> str:
        """Returns the coordinates of a rank on the other axes, in words: "pp=1 of 2". An axis of one rank is none."""
        sizes = dict(zip(self.mesh.mesh_dim_names or (), self.mesh.mesh.shape, strict=True))
        at = self.coordinates(rank)
        return " ".join(f"{name}={at[name]} of {sizes[name]}" for name in at if name != self.data and sizes[name] > 1)

    def check(self, wrapper: str, name: str, parameter: Any, needs_whole: bool) -> None:
        """Raises InvalidRequestError for a DTensor whose ranks ocomm cannot leave to torch, or of which it would need
        the norm (``needs_whole``).
        """
        others = parameter.device_mesh.mesh.flatten().tolist()
        me = sessions.current().require_topology().rank
        placements = list(map(str, parameter.placements))
        said = f"parameter '{name}' is a DTensor with placements {placements} over ranks {others}"
        if me not in others or not set(others) <= set(range(self.mesh.size())):
            raise InvalidRequestError(f"{said}, which is no part of the mesh of Distributed{wrapper}.")
        twins = sorted(set(others) & set(self.ranks))
        if twins != [me]:
            raise InvalidRequestError(
                f"{said}, of which ranks {twins} are on the data axis '{self.data}': torch averages or divides it "
                f"there, and Distributed{wrapper} would average again. Give fully_shard the inner axis alone: "
                "mesh=mesh['fsdp'], not the two axes of HSDP."
            )
        if needs_whole and not all(placement.is_replicate() for placement in parameter.placements):
            raise InvalidRequestError(
                f"{said}, and Distributed{wrapper} divides by the norm of a whole tensor, of which this rank has a "
                "part. Use DistributedOneBitAdam."
            )
        if any(placement.is_partial() for placement in parameter.placements):
            raise InvalidRequestError(f"{said}: a partial sum cannot be trained. Redistribute it first.")

    def grid(
        self, session: Session, wrapper: str, names: Sequence[str], parameters: Sequence[Tensor], local: LocalTensors
    ) -> Grid | None:
        """Returns this rank's place in the grid; None if the data axis is the only one. Collective over the ranks of
        this data coordinate.

        Args:
            session: The session of the job.
            wrapper: The optimizer's class, for messages.
            names: The names of the parameters.
            parameters: The parameters, plain or DTensors.
            local: Their local tensors.

        Raises:
            InvalidRequestError: Two pipeline stages have the same parameter.
        """
        if len(self.replica) == 1:
            return None
        me = session.require_topology().rank
        own = [sorted(self._inside(p)) if is_dtensor(p) else [] for p in parameters]
        number = ProcessSet(self.replica).number(session)
        found = zip(names, map(_fingerprint, local.tensors), strict=True)
        tied = [f"{name} {fingerprint}" for name, fingerprint in found if fingerprint]
        mine = "\n".join([" ".join(sorted({axis for axes in own for axis in axes})), *tied])
        said = [text.split("\n") for text in gather(session, number, f"grid of {wrapper}", mine)]
        divided = {axis for axes, *_ in said for axis in axes.split()}
        self.stages = {
            rank: {axis: at for axis, at in self.coordinates(rank).items() if axis not in divided}
            for rank in self.replica
        }
        parameters_of = [[(name, of) for name, _, of in (line.rpartition(" ") for line in lines[1:])] for lines in said]
        self._look_for_tied(wrapper, me, dict(zip(self.replica, parameters_of, strict=True)))
        at = self.coordinates(me)
        counted = []
        for parameter, axes in zip(parameters, own, strict=True):
            # Plain tensors, and DTensors of other axes, have replicas on an axis that divides others.
            counts = all(at[axis] == 0 for axis in divided.difference(axes))
            if axes:
                place = parameter.device_mesh.get_coordinate()
                is_replicated = [p.is_replicate() for p in parameter.placements]
                counts &= is_first_copy(place, is_replicated)
            counted.append(counts)
        return Grid(number, tuple(map(self.place, self.replica)), self.place(me), tuple(counted))

    def _inside(self, parameter: Any) -> set[str]:
        """Returns the axes of the mesh among whose ranks torch has placed a DTensor."""
        places = [self.coordinates(rank) for rank in parameter.device_mesh.mesh.flatten().tolist()]
        return {axis for axis in places[0] if len({place[axis] for place in places}) > 1}

    def _look_for_tied(self, wrapper: str, me: int, said: Mapping[int, Sequence[tuple[str, str]]]) -> None:
        """Looks for parameters of two stages that have the same elements; all ranks of a replica find the same.

        Args:
            wrapper: The optimizer's class, for messages.
            me: This rank; rank 0 logs.
            said: Names and fingerprints of parameters, by rank.

        Raises:
            InvalidRequestError: They have the same name, too. If names differ, a warning is logged: stages that were
                made with the same seed begin so.
        """
        alike: dict[str, list[tuple[int, str]]] = {}
        for rank, parameters in said.items():
            for name, fingerprint in parameters:
                alike.setdefault(fingerprint, []).append((rank, name))
        pairs = [
            (rank, other, name, beside)
            for owners in alike.values()
            for (rank, name), (other, beside) in itertools.combinations(owners, 2)
            if self.stages[rank] != self.stages[other]
        ]
        for rank, other, name, beside in pairs:
            if name == beside:
                raise InvalidRequestError(
                    f"parameter '{name}' of rank {rank} ({self.place(rank)}) has the name and the elements of one of "
                    f"rank {other} ({self.place(other)}). Distributed{wrapper} does not sum gradients of weights that "
                    "stages share: put them into one stage. If they only began equal, give stages names of their own: "
                    "[(f'stage{i}.' + name, p) for name, p in stage.named_parameters()]."
                )
        if pairs and me == 0:
            rank, other, name, beside = pairs[0]
            _log.warning(
                "Distributed%s: parameter '%s' of rank %d (%s) and '%s' of rank %d (%s) begin with the same elements. "
                "If they are meant to be one weight that stages share, put it into one stage: their gradients are not "
                "summed, and they will part. If only their seeds were equal, all is well.",
                wrapper,
                name,
                rank,
                self.place(rank),
                beside,
                other,
                self.place(other),
            )


def chosen_ranks(process_set: Any, mesh: DeviceMesh | None, data: str | None) -> Any:
    """Returns the ranks that ``process_set=``, or ``mesh=`` and ``data=``, have chosen. Collective with a mesh.

    Raises InvalidRequestError if both are given, or half of the second.
    """
    if mesh is None and data is None:
        return process_set
    if process_set is not None:
        raise InvalidRequestError("process_set= and mesh= were given: with a mesh, its axis data= has the ranks.")
    if mesh is None or data is None:
        given, missing = ("data", "mesh") if mesh is None else ("mesh", "data")
        raise InvalidRequestError(f"{given}= was given without {missing}=: pass mesh=mesh, data='dp', for instance.")
    return DataAxis(mesh, data)


def refuse_mesh(process_set: Any, wrapper: str) -> None:
    """Raises InvalidRequestError if an optimizer of a job that is over, which is to join another, has a mesh."""
    if isinstance(process_set, DataAxis):
        raise InvalidRequestError(
            f"Distributed{wrapper} was made with the mesh of a job that is over: an elastic job cannot keep a mesh. "
            "Make a new mesh, model and optimizer, and load a state."
        )


class LocalTensors:
    """The tensors of this rank: each parameter itself, or the tensor inside a DTensor, with its gradient in a step.

    ``tensors`` has a plain tensor for each of ``parameters``. That of a DTensor shares its memory, and its ``grad`` is
    set by ``take_gradient``.
    """

    def __init__(self, parameters: Sequence[Tensor], is_mesh: bool) -> None:
        #: The DTensors, by index; none without a mesh, where they are refused.
        self.inside: dict[int, Any] = {i: p for i, p in enumerate(parameters) if is_mesh and is_dtensor(p)}
        self.tensors = [_local(p).detach() if i in self.inside else p for i, p in enumerate(parameters)]
        # The gradient from which that of a local tensor was taken, and its version then.
        self._taken: dict[int, tuple[Any, int]] = {}

    def placed(self, index: int, local: Tensor) -> Tensor:
        """Returns a DTensor whose part here is ``local``, divided as parameter ``index``; ``local`` if it is plain."""
        parameter = self.inside.get(index)
        if parameter is None:
            return local
        from torch.distributed.tensor import DTensor

        mesh, shape = parameter.device_mesh, parameter.shape
        return DTensor.from_local(
            local, mesh, parameter.placements, run_check=False, shape=shape, stride=parameter.stride()
        )

    def follow(self) -> None:
        """Follows DTensors whose local tensor was replaced."""
        for index, parameter in self.inside.items():
            local, tensor = _local(parameter), self.tensors[index]
            if (local.data_ptr(), local.shape, local.dtype) != (tensor.data_ptr(), tensor.shape, tensor.dtype):
                tensor.data = local.detach()

    def take_gradient(self, index: int, final: bool) -> bool:
        """Takes the gradient of a DTensor for its local tensor.

        Returns False, and takes nothing, if that has to wait for ``step()``, where it is ``final``: a partial sum,
        which torch adds up in one order on all ranks; or one that torch may still be copying to the host.
        """
        parameter = self.inside[index]
        grad = parameter.grad
        if grad is None:
            self.tensors[index].grad = None
            self._taken.pop(index, None)
            return True
        if grad.placements != parameter.placements:
            if not final:
                return False
            grad = grad.redistribute(parameter.device_mesh, parameter.placements)
        elif not final and _COPIES_LATE and self.tensors[index].is_pinned():
            return False
        taken = self._taken.get(index)
        if final or taken is None or taken[0] is not grad:
            # Shares memory and version; a view, so that what ``watched`` does to its class does not reach that of the
            # DTensor. A later pass that adds to the same gradient finds the same view.
            self.tensors[index].grad = _local(grad).detach()
        self._taken[index] = parameter.grad, parameter.grad._version
        return True

    def take_gradients(self) -> bool:
        """Takes all gradients, for ``step()``. Returns True if one that was taken has changed since."""
        changed = False
        for index, parameter in self.inside.items():
            taken = self._taken.get(index)
            if taken is not None and parameter.grad is taken[0] and parameter.grad._version == taken[1]:
                continue
            changed |= taken is not None
            self.take_gradient(index, True)
        return changed

    def forget(self) -> None:
        """Ends a step."""
        for index in self.inside:
            self.tensors[index].grad = None
        self._taken.clear()


#: Before 2.13 fully_shard with CPUOffloadPolicy called hooks while gradients were on their way to pinned memory.
_COPIES_LATE = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def _fingerprint(tensor: Tensor) -> str:
    """Returns a hash of the tensor's shape and first elements; "" if these are equal: many weights begin as ones."""
    first = tensor.detach().reshape(-1)[:4096].float().cpu()
    if first.numel() < 2 or bool((first == first[0]).all()):
        return ""
    return hashlib.blake2b(repr(tuple(tensor.shape)).encode() + first.numpy().tobytes(), digest_size=8).hexdigest()


def is_first_copy(coordinate: Sequence[int], is_replicated: Sequence[bool]) -> bool:
    """Returns True on one of the ranks that have the same part of a DTensor, so that a norm counts it once.

    Args:
        coordinate: This rank's place on each axis of the tensor's mesh.
        is_replicated: Whether the tensor is the same along each axis.
    """
    return not any(place and is_same for place, is_same in zip(coordinate, is_replicated, strict=True))


def inside(value: Any) -> Any:
    """Returns the local tensor of a DTensor, and any other value as it is."""
    return _local(value) if isinstance(value, Tensor) and is_dtensor(value) else value


def _local(tensor: Any) -> Tensor:
    with torch.no_grad():
        local = tensor.to_local()
        return local.wait() if hasattr(local, "wait") else local
