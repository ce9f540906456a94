"""The messages between the fork server and its client, the process that needs ranks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from .blocks import Room
from .job import Named
from .report import Exit


class StartMethod(enum.Enum):
    """How ranks start."""

    FORK = "fork"  # forked from a fork server that is forked from the main process
    FORK_FRESH = "fork-fresh"  # forked from a fork server that is a new interpreter and has imported the test module
    SPAWN = "spawn"  # each rank is a new interpreter


@dataclass(frozen=True)
class Serve:
    """The first message to a fork server that is a new interpreter. `parent`: the pid of its client."""

    directory: Path
    method: StartMethod
    parent: int
    argv: tuple[str, ...]
    subject: Named


@dataclass(frozen=True)
class Launch:
    """Start all ranks of a pickled job. Answered by Started, Unable or Failed."""

    run: int
    job: bytes


@dataclass(frozen=True)
class LaunchBlock:
    """Start the block of a pickled job that is for this node; the main process of its test is on another one."""

    run: int
    job: bytes
    environ: Mapping[str, str]  # the variables that the main process has changed
    unset: tuple[str, ...]


@dataclass(frozen=True)
class OpenStore:
    """Serve a store for the ranks of a run, on all nodes. Answered by StoreOpened."""

    run: int


@dataclass(frozen=True)
class CloseStore:
    """The run is over: end its store."""

    run: int


@dataclass(frozen=True)
class SignalGroups:
    """Signal all ranks of a run that are still running, and all processes in their groups."""

    run: int
    number: int


@dataclass(frozen=True)
class SignalRank:
    """Signal one rank and none of the processes that it started."""

    run: int
    rank: int
    number: int


@dataclass(frozen=True)
class Dump:
    """Have ranks write their stacks and flight recorders. Answered by Dumped, at the latest after `patience`."""

    run: int
    ranks: tuple[int, ...]
    patience: float


@dataclass(frozen=True)
class Look:
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


ToServer: TypeAlias = (
    Serve | Launch | LaunchBlock | OpenStore | CloseStore | SignalGroups | SignalRank | Dump | Look | Preload | Quit
)


@dataclass(frozen=True)
class Hello:
    """The fork server is ready, or not safe to fork for the reason `unsafe`; `in_use`: as an accelerator is in use."""

    unsafe: str | None
    in_use: bool = False


@dataclass(frozen=True)
class Started:
    """All ranks of a run have started."""

    run: int
    pids: tuple[int, ...]


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
class Unable:
    """This server cannot start the job, but a new one could."""

    run: int
    why: str


@dataclass(frozen=True)
class Failed:
    """The ranks of a run could not be started."""

    run: int
    why: str


@dataclass(frozen=True)
class StoreOpened:
    """The store of a run listens at this port; 0 if it could not be made."""

    run: int
    port: int


@dataclass(frozen=True)
class FileOfRun:
    """A file that the ranks of another node have written, compressed."""

    run: int
    name: str
    data: bytes


FromServer: TypeAlias = Hello | Started | Exited | Dumped | Unable | Failed | StoreOpened | FileOfRun


# -- between the main process of a test that has ranks on several nodes, and what connects it with the other nodes


@dataclass(frozen=True)
class RoomOfNodes:
    """The first message to the main process: the nodes, its own first."""

    rooms: tuple[Room, ...]


@dataclass(frozen=True)
class FromNode:
    """A message of the fork server of another node, as JSON. Its times are of that node: add `ahead` to them."""

    group: int
    line: str
    ahead: float


@dataclass(frozen=True)
class NodeLost:
    """The fork server of another node is gone, with its ranks."""

    group: int
    why: str


@dataclass(frozen=True)
class ToNode:
    """A message for the fork server of another node, as JSON."""

    group: int
    line: str


ToMainProcess: TypeAlias = RoomOfNodes | FromNode | NodeLost
