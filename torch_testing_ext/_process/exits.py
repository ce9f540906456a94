"""Descriptions of how a process ended."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """`SIGKILL`; `signal 70` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(code: int | None, when: str = "") -> str:
    """Describe the end of a process as a predicate: `was killed by SIGKILL 0.3 s into test_x (out of memory?)`.

    `code` is negative for a signal, and None if the exit status is unknown. `when` begins with a space.
    """
    if code is None:
        return f"ended in an unknown way{when}"
    if code >= 0:
        return f"exited with code {code}{when}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal_name(-code)}{when}{hint}"
