"""Networks: ``local`` (ranks are threads of this process) and ``mpi``. See ``base.Transport``."""

from ocomm.transport.base import Request, Transport

__all__ = ["Request", "Transport"]
