"""The messages between run_test.py and the bridge, the one process that imports ray."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch_testing_ext._process.channel import WithDescriptors

from .reservations import Wish


@dataclass(frozen=True)
class Connect:
    """Connect to a cluster and start agents on its nodes."""

    wish: Wish  # the nodes that the run wants, and the address of the cluster
    folder: str  # of temporary files, to be removed when run_test.py is killed
    root: str  # the path of the project on every node; empty if it is sent
    digest: str  # of the project's files at `root`, to be compared; empty if it is sent
    setup: str  # a shell command for each node
    environ: Mapping[str, str]  # for the agents, beside that of their node
    path: tuple[str, ...]  # the folders of the project where modules are imported from
    archive: str = ""  # a tar of the project; empty if `root` is on every node
    times: Mapping[str, int] = field(default_factory=dict)  # when files of the archive were modified, in nanoseconds
    cleans: bool = False  # only remove what the nodes have kept


@dataclass(frozen=True)
class ReleaseNode:
    """An agent is lost or not needed any more."""

    serial: int
    refused: str = ""  # why its node is of no use for this run, and is left alone


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
    serial: int  # tells this agent from others that were on the node before
    root: str  # of the project, there
    cpus: int
    gpus: tuple[str, ...]  # as Ray names them
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
