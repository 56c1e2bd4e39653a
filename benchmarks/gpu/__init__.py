"""What ocomm costs on a GPU: steps, copies through pinned memory, and how large a model fits.

``step``, ``staging`` and ``offload`` are programs of their own; ``tools/gpu_day.sh`` runs them all. With ``--device
fake`` each runs small, without a GPU, on parameters in the host's memory that ocomm takes for a device's
(``tests/fake_device.py``): its times mean nothing, but everything that the program does has been done once.
"""
