"""The exception of this package."""

from __future__ import annotations


class InvalidRequestError(ValueError):
    """An argument cannot be right. The message names it, with the numbers that do not fit and what to do.

    A class of this package's own, which imports nothing but torch. Like ocomm's of this name it is a ValueError.
    """
