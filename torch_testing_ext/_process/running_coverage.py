"""The measurement of coverage that runs in this process."""

import sys
from typing import Any


def current_coverage() -> Any:
    """The `Coverage` that measures this process; None if there is none, or if its release cannot say so."""
    module = sys.modules.get("coverage")
    current = getattr(getattr(module, "Coverage", None), "current", None)
    return None if current is None else current()
