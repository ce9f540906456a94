"""The messages between the fork server and its client, the process that needs ranks."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch_testing_ext._process.fork_host import Exit
from torch_testing_ext.launch.named import Named


class StartMethod(enum.Enum):
    """The way in which ranks start."""

    FORK = "fork"  # forked from a fork server that is forked from the main process
    FORK_FRESH = "fork-fresh"  # forked from a fork server that is a new interpreter and has imported the test module
    SPAWN = "spawn"  # each rank is a new interpreter


@dataclass(frozen=True)
class Serve:
    """All that a fork server has to know, and the first message to one that is a new interpreter.

    `directory` belongs to the session of the client, whose pid is `parent`: the server removes it if the client ends
    without having removed it.
    """

    directory: Path
    method: StartMethod
    parent: int
    argv: tuple[str, ...]
    subject: Named


@dataclass(frozen=True)
class Launch:
    """Start the first ranks of a pickled job, most often all. Answered by Started or StartFailed."""

    run: int
    job: bytes


@dataclass(frozen=True)
class Start:
    """Start one rank of a run, later than the others or again. Answered by StartedRank or StartFailed."""

    run: int
    rank: int
    job: bytes


@dataclass(frozen=True)
class Signal:
    """Signal all ranks of a run that are still running, with all processes in their groups; or one rank alone."""

    run: int
    number: int
    rank: int | None = None


@dataclass(frozen=True)
class Dump:
    """Have ranks write their stacks and flight recorders. Answered by Dumped, at the latest after `timeout`."""

    run: int
    ranks: tuple[int, ...]
    timeout: float


@dataclass(frozen=True)
class Probe:
    """Have ranks of a run write their collectives and the state of their threads. There is no answer."""

    run: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Preload:
    """Follow preload hints, so that the next ranks need not: at once, or when there is nothing else to do."""

    modules: tuple[str, ...]
    at_once: bool = False


@dataclass(frozen=True)
class Quit:
    """End, together with everything that the server has started."""


ToServer: TypeAlias = Serve | Launch | Start | Signal | Dump | Probe | Preload | Quit


@dataclass(frozen=True)
class Hello:
    """The fork server is ready, or not safe to fork for the reason `unsafe`; `in_use`: as an accelerator is in use."""

    unsafe: str | None
    in_use: bool = False


@dataclass(frozen=True)
class Started:
    """The first ranks of a run have started."""

    run: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class StartedRank:
    """A rank of a run has started, later than the others or again."""

    run: int
    rank: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """A rank has ended, together with everything that it had started."""

    run: int
    rank: int
    exit: Exit


@dataclass(frozen=True)
class Dumped:
    """The ranks of a run have written their stacks and flight recorders, or took too long."""

    run: int


@dataclass(frozen=True)
class StartFailed:
    """The ranks of a run could not be started. `needs_new_server`: another server could start them."""

    run: int
    why: str
    needs_new_server: bool


FromServer: TypeAlias = Hello | Started | StartedRank | Exited | Dumped | StartFailed
