"""Loops of the standard library in which a thread waits until another thread of its process wakes it."""

from __future__ import annotations

import types
from contextlib import suppress
from typing import Any

from .reachable_threads import variables_by_name


def is_woken_by_threads_alone(frame: types.FrameType) -> bool:
    """Whether the innermost frame of a thread waits in such a loop: of asyncio, or of a pool of multiprocessing.

    Asyncio's has no timer, and selects no other file than the one by which threads wake it. The keeper of a pool waits
    for changes alone; for processes it waits, too.
    """
    outer = frame.f_back
    if frame.f_globals.get("__name__") != "selectors" or outer is None:
        return False
    # A loop of another project may be made in another way.
    with suppress(AttributeError, KeyError):
        if outer.f_code.co_name == "_run_once":
            loop: Any = dict(variables_by_name(outer))["self"]
            return not loop._scheduled and {*loop._selector.get_map()} == {loop._ssock.fileno()}
        keeper: Any = outer.f_back
        known = dict(variables_by_name(keeper))
        return (
            keeper.f_code.co_name == "_wait_for_updates" and known["timeout"] is None and len(known["sentinels"]) == 1
        )
    return False
