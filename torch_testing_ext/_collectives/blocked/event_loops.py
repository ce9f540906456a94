"""Event loops of asyncio in which a thread waits."""

from __future__ import annotations

import sys
import types
from contextlib import suppress

from .reachable_threads import variables_by_name

_SELECTORS = "selectors"


def is_woken_by_threads_alone(frame: types.FrameType) -> bool:
    """Whether the innermost frame of a thread waits in an event loop of asyncio that another thread must wake.

    Such a loop has no timer, and selects no other file than the one by which threads wake it.
    """
    if frame.f_globals.get("__name__") != _SELECTORS or "asyncio" not in sys.modules:
        return False
    loop = None
    outer = frame.f_back
    if outer is not None and outer.f_code.co_name == "_run_once":
        loop = dict(variables_by_name(outer)).get("self")
    # A loop of another project may be made in another way.
    with suppress(AttributeError):
        selected = set(loop._selector.get_map())  # type: ignore[union-attr]
        return not loop._scheduled and selected == {loop._ssock.fileno()}  # type: ignore[union-attr]
    return False
