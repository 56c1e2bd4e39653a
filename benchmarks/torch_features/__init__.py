"""Features of torch.distributed over backend "ocomm" against gloo: the same numbers, and times as ratios.

``features`` is the list; ``job`` compares and times it as the ranks of a job; ``__main__`` is the command, which keeps
the results and makes the tables of them.
"""
