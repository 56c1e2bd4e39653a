"""``ocommrun``: starts one training script on many processes through the MPI that is there.

``hosts`` parses ``-H`` and host files, ``flavour`` finds out which MPI starts and which one mpi4py loads, ``command``
builds the command line (a pure function of a request), ``reach`` asks the remote hosts over ssh, ``check`` prints
``--check-build``, and ``cli`` is the thin shell that reads the arguments and becomes the MPI's own launcher, or
``supervise`` runs it. Of a supervised job ``generations``, ``reports`` and ``failures`` decide.

The package may not touch the runtime: it has to work, and to explain, where the runtime cannot even be imported.
"""
