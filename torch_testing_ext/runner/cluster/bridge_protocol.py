"""The messages between run_test.py and the bridge, the one process that imports ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch_testing_ext._process.channel import WithDescriptors


@dataclass(frozen=True)
class Connect:
    """Connect to a cluster and start agents on its nodes."""

    address: str
    nodes: int | None  # how many to use; None for all that have something free
    gpus_per_node: int | None
    folder: str  # of temporary files, to be removed when run_test.py is killed
    archive: str  # a tar of the project; empty if `root` is on every node
    root: str  # the path of the project on every node; empty if it is sent
    digest: str  # of the project's files at `root`, to be compared; empty if it is sent
    setup: str  # a shell command for each node
    environ: Mapping[str, str]  # for the agents, beside that of their node
    on_path: bool  # whether the project's folder is where modules are imported from


@dataclass(frozen=True)
class ReleaseNode:
    """An agent is lost or not needed any more."""

    serial: int


ToBridge: TypeAlias = Connect | ReleaseNode


@dataclass(frozen=True)
class RayImported:
    """The bridge has imported ray, and connects."""


@dataclass(frozen=True)
class CannotConnect:
    """There is no such cluster, or no node will ever do; the reason."""

    why: str


@dataclass(frozen=True)
class BridgeWaits:
    """The thing that the bridge waits for, in words; empty for nothing."""

    text: str


@dataclass(frozen=True)
class NodeJoined(WithDescriptors):
    """An agent runs on a node. The descriptor is its stream."""

    name: str
    serial: int  # tells this agent from others that were on the node before
    root: str  # of the project, there
    cpus: int
    gpus: tuple[str, ...]  # as Ray names them


@dataclass(frozen=True)
class NodeGone:
    """An agent has ended, or its node; how. It may not have joined."""

    name: str
    why: str
    is_node: bool = False  # something has happened to the node; nothing is wrong with what was to run there


@dataclass(frozen=True)
class NodeDrains:
    """A node is about to be taken away."""

    name: str


FromBridge: TypeAlias = RayImported | CannotConnect | BridgeWaits | NodeJoined | NodeGone | NodeDrains
