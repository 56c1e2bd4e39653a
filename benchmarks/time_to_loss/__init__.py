"""Seconds to a loss, by the rate and the delay of the network, for every method: ``make time-to-loss``.

Three parts, each with its own file of results. ``losses`` trains each method on four ranks and keeps the validation
loss, and what each step sent; ``steps`` measures how long each kind of step takes on a shaped network; ``join`` makes
seconds of the two, and ``__main__`` a table. ``cells`` and ``whole`` measure such runs from end to end.
"""
