"""Hooks on the methods of backends that a program calls itself, without a process group of torch around them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch_testing_ext._torch.replacing import Hooks

from .operation_hook import is_kernel

# The kind of each call by its method: 2.11 to 2.15.
KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
# Issues a call of this kind, by the function that it is given.
OnBackend = Callable[[str, Callable[[], Any]], Any]


# The listeners issue each call of a backend, unless it is part of an operation of c10d.
hooks: Hooks[OnBackend] = Hooks(lambda _: {"calls of backends": _watched_method})


def _watched_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    kind = KINDS[name]

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        issue = functools.partial(method, *args, **kwargs)
        if hooks.listeners and not _is_in_operation():
            for on_call in hooks.listeners:
                issue = functools.partial(on_call, kind, issue)
        return issue()

    return call


def _is_in_operation() -> bool:
    """Whether an operation of c10d is being issued here, as by a backend in Python."""
    frame = sys._getframe(2)
    while frame is not None:
        if is_kernel(frame.f_code):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
