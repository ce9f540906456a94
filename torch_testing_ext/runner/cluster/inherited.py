"""Undoes what a process inherits from a worker of Ray that starts it, so that tests run as they do elsewhere."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Set by Ray for its workers alone. OMP_NUM_THREADS is one for each CPU of the actor; tests decide for themselves.
OF_WORKER = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")


def undo_worker() -> list[str]:
    """Give this process what a shell would. Returns a warning for each thing that cannot be undone."""
    return [*_undo_niceness(), *_undo_limits()]


def _undo_niceness() -> Iterator[str]:
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        except OSError:
            yield (
                f"tests run at niceness {nice}, which makes them slower beside other work: "
                "start Ray with RAY_worker_niceness=0"
            )


def _undo_limits() -> Iterator[str]:
    with suppress(OSError):  # only root may lower it: the kernel then prefers our processes when it is out of memory
        Path("/proc/self/oom_score_adj").write_text("0")
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    yield from ()
