"""The messages to and from the supervisor of a unit."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from .fork_parent_messages import StartUnit


class AboutWorker(enum.Enum):
    """A request to a supervisor about the unit that it watches."""

    TAKE_STACKS = "have all processes of the unit write their stacks"
    END = "end the worker: SIGTERM, then SIGKILL"
    KILL = "kill the worker at once"


@dataclass(frozen=True)
class StacksTaken:
    """The processes of the unit have written their stacks, or took too long."""


@dataclass(frozen=True)
class WorkerEnded:
    """The worker has ended and no process of the unit is left. `leftovers` describes those that had to be ended."""

    status: int
    at: float
    leftovers: tuple[str, ...]


@dataclass(frozen=True)
class SupervisorWatches:
    """A supervisor begins to watch the unit: all processes of the unit descend from it."""

    pid: int


ToSupervisor: TypeAlias = StartUnit | AboutWorker
FromSupervisor: TypeAlias = StacksTaken | WorkerEnded | SupervisorWatches
