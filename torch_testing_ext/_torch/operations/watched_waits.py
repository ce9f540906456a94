"""Hooks on the methods by which Python code waits for a work or its future."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch

from torch_testing_ext._torch.replacing import Hooks, Make

# The methods after which a work is complete, on a CPU.
_ENDS = ("wait", "is_completed")
_COMPUTING = (torch, torch.Tensor, torch.futures.Future)  # whose functions tell nobody that something is complete
_waiting: dict[int, int] = {}  # by thread: how many waits it is in that have no time-out of their own


class FutureListener(Protocol):
    """Hears of the futures of works."""

    def future_taken(self, work: Any, future: Any) -> None:
        """A caller has got the future of a work."""

    def future_used(self, future: Any) -> None:
        """A caller waits for a future, or leaves that to others."""

    def future_chained(self, future: Any, result: Any) -> None:
        """A caller has got the result of a callback that only computes, and can only wait for this."""


@dataclass(frozen=True)
class WaitListener:
    """Hears of waits: `on_wait(work)` before each, `on_waited(work, is_complete)` after it, before the code goes on.

    `on_error` is called when one raises. Without `futures`, a call of `get_future` counts as a wait.
    """

    on_wait: Callable[[Any], None] | None = None
    on_error: Callable[[], None] | None = None
    futures: FutureListener | None = None
    on_waited: Callable[[Any, bool], None] | None = None


def _functions(listener: WaitListener) -> dict[str, Make]:
    """The functions that a listener wants to hear of. `torch._C.Future`, `torch._C._collect_all`: 2.11 to 2.15."""
    waits: dict[str, Make] = {"waits for works": _watched}
    return waits if listener.futures is None else {**waits, "uses of futures": _watched_use}


hooks = Hooks(_functions)


def _future_listeners() -> list[FutureListener]:
    return [listener.futures for listener in hooks.listeners if listener.futures is not None]


def _watched_use(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if name == "_collect_all":
        return _watched_collection(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_chained = name == "then" and len(args) == 1 and _only_computes(args[0])
        result = method(self, *args, **kwargs) if is_chained or name == "done" else None
        for listener in _future_listeners():
            if is_chained:
                listener.future_chained(self, result)
            elif result is not False:
                listener.future_used(self)
        return method(self, *args, **kwargs) if result is None else result

    return call


def _only_computes(callback: Any) -> bool:
    """Whether a callback uses only functions of torch. Another one may tell somebody that it has run."""
    code = getattr(callback, "__code__", None)
    names = (
        () if code is None else (*code.co_names, *("" for constant in code.co_consts if isinstance(constant, CodeType)))
    )
    return code is not None and all(
        name == "torch" or any(hasattr(computing, name) for computing in _COMPUTING) for name in names
    )


def _watched_collection(collect: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def call(futures: list[Any]) -> Any:
        for listener in _future_listeners():
            for future in futures:
                listener.future_used(future)
        return collect(futures)

    return call


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a work that tells who waits for it, or asks for its future."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # In a backward pass, C++ may get the future from a hook.
        may_be_used = name == "get_future" and torch._C._current_graph_task_id() == -1
        taken_by = _future_listeners() if may_be_used else []
        if name != "is_completed":
            _tell_of_wait(self, taken_by)
        thread = threading.get_ident()
        is_endless = name == "wait" and not args and not kwargs
        is_complete = False
        if is_endless:
            _waiting[thread] = _waiting.get(thread, 0) + 1
        try:
            result = method(self, *args, **kwargs)
            is_complete = name in _ENDS and result is not False
        except Exception:
            for listener in _waiting_listeners(taken_by):
                if listener.on_error is not None:
                    listener.on_error()
            raise
        finally:
            if is_endless:
                _waiting[thread] -= 1
            if name == "is_completed" and is_complete:
                _tell_of_wait(self, taken_by)
            for listener in _waiting_listeners(taken_by):
                if (name != "is_completed" or is_complete) and listener.on_waited is not None:
                    listener.on_waited(self, is_complete)
        for futures in taken_by:
            futures.future_taken(self, result)
        return result

    return call


def _waiting_listeners(taken_by: list[FutureListener]) -> tuple[WaitListener, ...]:
    """The listeners to waits now, but for those that take the future instead."""
    if not taken_by:
        return hooks.listeners
    return tuple(listener for listener in hooks.listeners if listener.futures not in taken_by)


def _tell_of_wait(work: Any, taken_by: list[FutureListener]) -> None:
    for listener in _waiting_listeners(taken_by):
        if listener.on_wait is not None:
            listener.on_wait(work)


def is_waiting_for_work(thread: int) -> bool:
    """Whether a thread waits for a work now, with no other time-out than that of the work's group."""
    return _waiting.get(thread, 0) > 0
