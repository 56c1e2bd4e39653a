"""Programs that once failed, by kind: each is a line that a search has printed."""

from __future__ import annotations

from typing import Any

#: By the name of the kind.
FOUND: dict[str, list[Any]] = {}
