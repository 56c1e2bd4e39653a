"""The timeline, in which the runtime records what it does. The lowest layer, so that all others may write to it."""
