"""A fault at every call of our own: allocations in C, MPI's functions, the transport, files and sockets.

A workload runs once without a fault, and every call site counts its calls (``calls``, ``layers``). Then it runs again
and again, each time with one fault: at the first, the second or the last call of a site, on one rank. After each run
(``trail``, ``world``):

- every rank has ended before the deadline;
- a rank that did not do all of the workload has raised an error with a name;
- what each rank has computed, step by step, is a beginning of what it computes without a fault, and its state is that
  before or after a whole step.

Ranks are threads of one process, or, in a sample of cases, processes of a real job (``mpirun``). The workload is in
``workloads``, what uses files and sockets in ``scenarios``. ``python -m tests.faults`` runs all cases and writes a
table.
"""
