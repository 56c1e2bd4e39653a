"""Networks that implement ``base.Transport``: ``local`` (ranks are threads of this process), ``mpi``, and ``nccl``."""

from ocomm.transport.base import Request, Transport

__all__ = ["Request", "Transport"]
