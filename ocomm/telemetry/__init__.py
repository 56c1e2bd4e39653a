"""The timeline, in which the runtime records what it does, and the log. The lowest layer: all write to it."""
