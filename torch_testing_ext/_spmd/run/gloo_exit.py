"""A clean exit for processes that have run steps over gloo.

A gloo thread frees a collective's tensors some microseconds after the wait for that collective has returned, and takes
the GIL to do so. If the interpreter exits at that moment, the process aborts ("terminate called without an active
exception"). Destroying the group would wait for the thread, but the first collective of a DTensor makes torch keep
the default group forever: docs/found/gloo_abort_at_exit.py shows the abort with torch alone.
"""

from __future__ import annotations

import atexit
import functools
import time

# The thread is already waiting for the GIL and gets it as soon as this thread releases it.
_GRACE_SECONDS = 0.002


@functools.cache
def let_gloo_finish() -> None:
    """Release the GIL for a moment before the interpreter exits."""
    atexit.register(time.sleep, _GRACE_SECONDS)
