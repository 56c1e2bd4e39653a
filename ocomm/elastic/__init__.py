"""Training that continues after a failure: states that are committed, restored and synchronized, and a loop around
it.
"""

from ocomm.elastic.commits import Part
from ocomm.elastic.loop import run
from ocomm.elastic.state import ObjectState, State

__all__ = ["ObjectState", "Part", "State", "run"]
