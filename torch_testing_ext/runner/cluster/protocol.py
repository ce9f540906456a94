"""The messages between run_test.py and the agent of a node: lines of JSON over any byte stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch_testing_ext.launch.blocks import Room

from ..engine.unit_log import EndCause
from ..model import Attempt, Lease, Test, Unit
from ..options.options import OrderHazard

# Seconds between two signs of life of an agent, and how many may be missing before its node counts as lost.
HEARTBEAT = 1.0
MOST_MISSING = 15


# -- to the agent


@dataclass(frozen=True)
class PrepareNode:
    """Start the processes of a node. The first message to an agent."""

    root: str  # of the tested project, on the node
    drop_in: bool
    jobs: int | None  # the most CPU slots to use; None for one per usable core
    devices: int | None  # the most accelerators to use; None for all that the node's mask shows
    fake_devices: tuple[str, ...]  # the names of accelerators that do not exist, to try out a cluster without any
    timeout: float
    slow: float
    stream: bool
    command: str  # that reruns a test whose name is appended
    environ: Mapping[str, str]  # variables of run_test.py that tests may read
    all_marks: bool = False  # collect also tests that a `-m` in the project's options for pytest leaves out
    sanitize: str | None = None
    sanitize_order: OrderHazard = OrderHazard.WARN
    shake_seed: int | None = None  # of the first repetition
    allow_multi_node: bool = False
    address: str = ""  # of the node, for the others; empty if the agent is to find it out
    reserved: int = 0  # accelerators that Ray or Slurm has reserved there
    undo_worker: bool = False  # the agent was started by a worker of Ray


@dataclass(frozen=True)
class FindTests:
    """Import files and list their tests."""

    files: tuple[str, ...]
    devices: int  # of the largest node
    jobs: int
    together: int = 0  # devices of all nodes


@dataclass(frozen=True)
class RunUnit:
    """Run a unit on a lease of the node."""

    unit: Unit
    lease: Lease
    devices: int  # of the largest node
    together: int = 0  # devices of all nodes
    rooms: tuple[Room, ...] = ()  # where its ranks are if it has some on other nodes, too: this node first


@dataclass(frozen=True)
class HoldBlock:
    """Be ready to start ranks for a unit that runs on another node, on a lease of this one."""

    number: int  # of the unit
    file: str
    lease: Lease
    devices: int  # of the largest node
    together: int
    leased: int  # devices of the unit on all nodes


@dataclass(frozen=True)
class EndBlock:
    """The unit has ended: so do the processes of its block."""

    number: int
    at_once: bool = False


@dataclass(frozen=True)
class TellBlock:
    """A message of the unit's main process to the fork server of its block on this node."""

    number: int
    line: str


@dataclass(frozen=True)
class TellUnit:
    """A message of the fork server on another node to the main process of a unit on this one."""

    number: int
    group: int
    line: str
    ahead: float  # seconds to add to its times


@dataclass(frozen=True)
class BlockIsGone:
    """To the node of a unit's main process: the fork server on another node has ended."""

    number: int
    group: int
    why: str


@dataclass(frozen=True)
class EndUnit:
    """End a unit by escalation."""

    number: int
    cause: EndCause


@dataclass(frozen=True)
class KillUnit:
    """Kill a unit at once."""

    number: int


@dataclass(frozen=True)
class AskUnit:
    """Have the processes of a unit write their stacks."""

    number: int


@dataclass(frozen=True)
class CloseFile:
    """End the process of a file."""

    name: str


ToAgent: TypeAlias = (
    PrepareNode
    | FindTests
    | RunUnit
    | EndUnit
    | KillUnit
    | AskUnit
    | CloseFile
    | HoldBlock
    | EndBlock
    | TellBlock
    | TellUnit
    | BlockIsGone
)


# -- from the agent


@dataclass(frozen=True)
class NodeFacts:
    """What has to be the same everywhere, because outcomes and messages depend on it."""

    package: str  # version and digest of torch_testing_ext
    torch: str
    cuda: str  # or ROCm; empty for neither
    python: str
    platform: str


@dataclass(frozen=True)
class AgentHello:
    """The agent runs. The first message from it; before it, a login shell may have printed anything."""

    facts: NodeFacts
    host: str
    pid: int
    at: float


@dataclass(frozen=True)
class AgentAlive:
    """A sign of life, with the node's time.monotonic()."""

    at: float


@dataclass(frozen=True)
class NodeReady:
    """The processes of the node have started."""

    kind: str | None  # of its accelerators
    devices: tuple[str, ...]
    most_at_once: int
    fake: bool
    slots: int
    torch: str
    address: str = "127.0.0.1"


@dataclass(frozen=True)
class NodeCannotRun:
    """The node is of no use; the reason."""

    why: str


@dataclass(frozen=True)
class TestsFound:
    """The tests of all files that were asked for."""

    __test__ = False  # not a test for pytest to collect

    tests: tuple[Test, ...]
    broken: tuple[Attempt, ...]
    not_run: tuple[Attempt, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class TestOfUnitBegan:
    """A test of a unit begins. Here as below, a test is its index in the unit."""

    __test__ = False  # not a test for pytest to collect

    number: int
    test: int
    at: float


@dataclass(frozen=True)
class TestOfUnitIsSlow:
    """A test of a unit has been running for longer than --slow."""

    __test__ = False  # not a test for pytest to collect

    number: int
    test: int
    seconds: float


@dataclass(frozen=True)
class ResultsOfUnit:
    """Tests of a unit have ended."""

    number: int
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True)
class EndOfUnit:
    """No process of a unit is left. `rest`: its tests without a result."""

    number: int
    attempts: tuple[Attempt, ...]
    rest: tuple[int, ...]
    cause: EndCause


@dataclass(frozen=True)
class UnitNotStarted:
    """The system of the node refused what a unit needs."""

    number: int
    why: str


@dataclass(frozen=True)
class StacksOfUnit:
    """The stacks of a unit's processes."""

    number: int
    stacks: str


@dataclass(frozen=True)
class OutputOfUnit:
    """With -s: new output of a unit."""

    number: int
    text: str


@dataclass(frozen=True)
class UnitTellsBlock:
    """A message of a unit's main process on this node to the fork server of one of its blocks."""

    number: int
    group: int
    line: str


@dataclass(frozen=True)
class BlockTellsUnit:
    """A message of the fork server of a block on this node to the main process of its unit."""

    number: int
    line: str


@dataclass(frozen=True)
class BlockEnded:
    """No process of a block is left on this node."""

    number: int
    why: str


@dataclass(frozen=True)
class AgentWarned:
    """A warning for the user."""

    text: str


FromAgent: TypeAlias = (
    AgentHello
    | AgentAlive
    | NodeReady
    | NodeCannotRun
    | TestsFound
    | TestOfUnitBegan
    | TestOfUnitIsSlow
    | ResultsOfUnit
    | EndOfUnit
    | UnitNotStarted
    | StacksOfUnit
    | OutputOfUnit
    | UnitTellsBlock
    | BlockTellsUnit
    | BlockEnded
    | AgentWarned
)
