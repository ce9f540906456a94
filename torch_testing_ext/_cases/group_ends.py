"""Ends gloo's groups without its waits.

When gloo ends a group, it closes one connection after the other and for each waits until its network thread goes round
its loop: up to 10 ms, unless something wakes the thread. So a rank wakes it all the time while a group ends. The group
ends when it would have ended anyway, and in the same way: when nothing in Python refers to it any more. Only a peer
that still connects to it is waited for: gloo's slowness used to leave it the time. Where that cannot be, a group ends
in gloo's own time.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_testing_ext import _torch
from torch_testing_ext._process import wakeups

__rank_frame__ = True

_before_end: Callable[[], bool] | None = None
_pid = 0  # of the rank: a process that a test forks has none of its threads
# A group's gloo backends, which live a moment longer than the group, and the threads that came with them.
_ends: dict[weakref.ref[Any], tuple[list[Any], set[int]]] = {}


def begin(before_end: Callable[[], bool] | None) -> None:
    """In a rank: end the groups that are created from now on without gloo's waits, each after `before_end()`.

    With None, or if that returns False, a group ends in gloo's own time.
    """
    global _before_end, _pid
    _before_end, _pid = before_end, os.getpid()


@contextmanager
def creating() -> Iterator[list[Any]]:
    """Creates a process group within; the caller appends it to the list."""
    created: list[Any] = []
    if os.getpid() != _pid or _before_end is None:
        yield created
        return
    before = wakeups.all_threads()
    yield created
    for group in created:
        if backends := _torch.gloo_backends(group):
            _ends[weakref.ref(group, _end)] = backends, wakeups.all_threads() - before


def _end(reference: weakref.ref[Any]) -> None:
    """A group is gone. Its backends go now, unless something else refers to them, too."""
    backends, threads = _ends.pop(reference)
    if os.getpid() != _pid or _before_end is None or not _before_end():
        backends.clear()
        return
    names = wakeups.thread_names(threads)
    with wakeups.waking(thread for thread, name in names.items() if not _torch.is_gloo_worker(name)):
        backends.clear()
