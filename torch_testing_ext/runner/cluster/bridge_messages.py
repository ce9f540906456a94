"""The messages between the runner and the bridge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch_testing_ext._process.channels import WithDescriptors

from .node_choice import Wish


@dataclass(frozen=True)
class Connect:
    """Connect to a cluster and start agents on its nodes."""

    # The nodes that the run wants, and the address of the cluster.
    wish: Wish
    # The folder of temporary files, to be removed when the runner is killed.
    folder: str
    # The path of the project on every node; empty if it is sent.
    root: str
    # The digest of the project's files at `root`, to be compared; empty if the project is sent.
    digest: str
    # A shell command for each node.
    setup: str
    # The variables of the agents, added to those of their node.
    environ: Mapping[str, str]
    # The folders of the project where modules are imported from.
    path: tuple[str, ...]
    # A tar of the project; empty if `root` is on every node.
    archive: str = ""
    # The times at which files of the archive were modified, in nanoseconds.
    times: Mapping[str, int] = field(default_factory=dict)
    # Only remove what the nodes have kept.
    cleans: bool = False


@dataclass(frozen=True)
class ReleaseNode:
    """An agent is lost or not needed any more."""

    serial: int
    # The reason why its node is of no use for this run, and is left alone.
    refused: str = ""


@dataclass(frozen=True)
class TakeMore:
    """Whether the run has use for further nodes."""

    wanted: bool


ToBridge: TypeAlias = Connect | ReleaseNode | TakeMore


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
    # Tells this agent from others that were on the node before.
    serial: int
    # The root of the project on the node.
    root: str
    cpus: int
    # The GPUs, as Ray names them.
    gpus: tuple[str, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeGone:
    """An agent has ended, or its node; how. It may not have joined."""

    name: str
    why: str


@dataclass(frozen=True)
class NodeCleaned:
    """Nothing is kept on a node any more. `removed`: the paths of projects and folders there, or what failed."""

    name: str
    removed: tuple[str, ...]


@dataclass(frozen=True)
class NodeDrains:
    """A node is about to be taken away."""

    name: str


FromBridge: TypeAlias = RayImported | CannotConnect | BridgeWaits | NodeJoined | NodeGone | NodeCleaned | NodeDrains
