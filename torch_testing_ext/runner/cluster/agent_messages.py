"""The messages between the runner and the agent of a node."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch_testing_ext.runner.engine.unit_log import EndCause
from torch_testing_ext.runner.load_as import FilesFound, LoadAs
from torch_testing_ext.runner.model import Attempt, Lease, Unit
from torch_testing_ext.runner.options import Options, UsageError
from torch_testing_ext.runner.processes.file_processes import Discovery


class ClusterError(UsageError):
    """The cluster cannot run the tests; nothing was run."""


# Seconds between two signs of life of an agent, and how many may be missing before its node counts as lost.
HEARTBEAT = 1.0
MOST_MISSING = 15


@dataclass(frozen=True)
class PrepareNode:
    """Start the processes of a node. The first message to an agent."""

    # The root of the tested project on the node.
    root: str
    # The options of the run.
    options: Options
    # The most CPU slots to use; None for one per usable core.
    jobs: int | None
    # The names of accelerators that do not exist, to try out a cluster without any.
    fake_devices: tuple[str, ...]
    # The command that reruns a test whose name is appended.
    command: str
    # Variables of the runner that tests may read.
    environ: Mapping[str, str]
    # Accelerators that Ray or Slurm has reserved there.
    reserved: int = 0
    # The command that shows the failure of a test whose name is appended.
    show_command: str = ""
    # The agent was started by a worker of Ray.
    undo_worker: bool = False
    # Patterns of the files that come back; None if `root` is not a copy of the project.
    fetch: tuple[str, ...] | None = None
    # Tests rewrite expected texts, which come back as well.
    accepts: bool = False
    load_as: LoadAs = field(default_factory=LoadAs)


@dataclass(frozen=True)
class FindTests:
    """Import files and list their tests; the answer is a Discovery."""

    files: tuple[str, ...]
    # The accelerators of the largest node.
    devices: int
    jobs: int


@dataclass(frozen=True)
class FindFilesOfProject:
    """Ask pytest which files it collects; the answer is a FilesFound."""


@dataclass(frozen=True)
class RunUnit:
    """Run a unit on a lease of the node."""

    unit: Unit
    lease: Lease
    # The accelerators of the largest node.
    devices: int


@dataclass(frozen=True)
class EndUnit:
    """End a unit by escalation, or kill it `at_once`."""

    number: int
    cause: EndCause
    at_once: bool = False


@dataclass(frozen=True)
class AskUnit:
    """Have the processes of a unit write their stacks."""

    number: int


@dataclass(frozen=True)
class CloseFile:
    """End the process of a file."""

    name: str


@dataclass(frozen=True)
class FetchFiles:
    """Send the files of the project that tests have changed. No unit runs any more."""


ToAgent: TypeAlias = PrepareNode | FindFilesOfProject | FindTests | RunUnit | EndUnit | AskUnit | CloseFile | FetchFiles


@dataclass(frozen=True)
class NodeFacts:
    """Facts that must be the same everywhere, because outcomes and messages depend on them."""

    # Version and digest of torch_testing_ext.
    package: str
    torch: str
    # Or ROCm; empty for neither.
    cuda: str
    python: str
    platform: str


@dataclass(frozen=True)
class AgentHello:
    """The agent runs. The first message from it; before it, a login shell may have printed anything."""

    facts: NodeFacts
    pid: int
    at: float


@dataclass(frozen=True)
class AgentAlive:
    """A sign of life, with the node's time.monotonic()."""

    at: float


@dataclass(frozen=True)
class NodeReady:
    """The processes of the node have started."""

    # The kind of its accelerators.
    kind: str | None
    devices: tuple[str, ...]
    most_at_once: int
    fake: bool
    slots: int
    torch: str


@dataclass(frozen=True)
class NodeCannotRun:
    """The node is of no use; the reason."""

    why: str


@dataclass(frozen=True)
class BeganInUnit:
    """A test of a unit begins. Here as below, a test is its index in the unit."""

    number: int
    test: int
    at: float


@dataclass(frozen=True)
class IsSlowInUnit:
    """A test of a unit has been running for longer than the setting slow-after."""

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
class FileChanged:
    """A file that is not as it was sent. `digest`: empty if it is gone. `content`: None if it does not come back."""

    name: str
    digest: str
    content: bytes | None


@dataclass(frozen=True)
class AllFilesSent:
    """The answer to FetchFiles is complete."""


@dataclass(frozen=True)
class AgentWarned:
    """A warning for the user."""

    text: str


FromUnit: TypeAlias = BeganInUnit | IsSlowInUnit | ResultsOfUnit | EndOfUnit | StacksOfUnit | OutputOfUnit
FromProject: TypeAlias = FileChanged | AllFilesSent
FromAgent: TypeAlias = (
    AgentHello | AgentAlive | NodeReady | NodeCannotRun | FilesFound | Discovery | FromUnit | FromProject | AgentWarned
)
