"""Roots of collectives, which torch's flight recorders leave out."""

import functools
import time
from collections import deque
from collections.abc import Callable
from pickle import dumps
from typing import Any

from torch_testing_ext._torch import replacing

from .gloo_messages import not_compiled
from .made_groups import numbers_of_groups

# Taken before a test could replace it.
_now = time.time_ns
# The most calls that are kept, as many as in a recorder.
_MOST = 2_000
# The methods of a group, with the place of the root, or of the options that have it, among the arguments: 2.11 to 2.15.
METHODS_WITH_ROOTS = {"broadcast": 1, "reduce": 1, "gather": 2, "scatter": 2}

# For each call: the place of its group in `made_groups`, its kind, its root, and when it began and had been issued, in
# nanoseconds; the last is 0 until then.
_noted: deque[list[Any]] = deque(maxlen=_MOST)


def dump() -> list[tuple[int, bytes]]:
    """The roots of the latest calls, as the dump of a recorder is handed over, if there are any."""
    return [(0, dumps({"roots": list(_noted)}))] if _noted else []


def forget() -> None:
    _noted.clear()


@functools.cache
def watch_roots() -> None:
    """Note the roots of calls from now on. Those that C++ issues, as DDP does, are not seen."""
    replacing.replace_for_good("roots of calls", _noted_method)


def _noted_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    place = METHODS_WITH_ROOTS[name]

    @functools.wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        number = numbers_of_groups.get(group)
        given = args[place] if len(args) > place else kwargs.get("opts", kwargs.get("root"))
        root = getattr(given, "rootRank", given)
        if number is None or not isinstance(root, int):
            return method(group, *args, **kwargs)
        note = [number, name, root, _now(), 0]
        _noted.append(note)
        try:
            return method(group, *args, **kwargs)
        finally:
            note[-1] = _now()

    return not_compiled(call)
