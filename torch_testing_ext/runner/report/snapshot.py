"""The list of running tests, printed on SIGUSR1 or the key t. Pure."""

from __future__ import annotations

import textwrap

from ..events import Running, StatusRequested
from . import text


def snapshot(status: StatusRequested) -> str:
    """The running tests with their times, places and stacks."""
    if not status.running:
        return "no test is running\n"
    heading = f"{text.count(len(status.running), 'test')} running:"
    return "\n".join([heading, *(_one(running) for running in status.running)]) + "\n"


def _one(running: Running) -> str:
    line = f"  {text.duration(running.seconds):>9}  {running.test.id}  on {text.place(running.lease) or 'no slot'}"
    stacks = textwrap.indent(text.printable(running.stacks).rstrip(), " " * 6)
    return f"{line}\n{stacks}" if stacks else line
