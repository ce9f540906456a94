"""The end of a process that has run steps over gloo.

A thread of gloo drops a collective's tensors some microseconds after the collective was waited for, and takes the GIL
for it. Where that falls into the interpreter's end, the process aborts ("terminate called without an active
exception"). Destroying the group would wait for the thread, but the first collective of a DTensor makes torch keep
the default group for ever: docs/found/gloo_abort_at_exit.py, where torch alone aborts.
"""

from __future__ import annotations

import atexit
import functools
import time

# The thread is at the GIL already: it has it as soon as we let go.
_LONG_ENOUGH = 0.002


@functools.cache
def let_gloo_finish() -> None:
    """Let go of the GIL for a moment before the interpreter ends."""
    atexit.register(time.sleep, _LONG_ENOUGH)
