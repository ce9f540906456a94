"""The processes that ranks of this process have left running, and that their fork server has ended.

The runner takes them when a test or a fixture has ended: a test that passes but leaves some has *leaked*.
"""

from collections.abc import Iterable

_noted: list[str] = []


def note(processes: Iterable[str]) -> None:
    """Note processes, described by the rank that has left them, pid and command."""
    _noted.extend(processes)


def take() -> tuple[str, ...]:
    """Return the processes that were noted since the last call."""
    descriptions = tuple(_noted)
    _noted.clear()
    return descriptions
