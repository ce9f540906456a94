"""The messages between the runner and the processes of a run."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._machine.device_needs import DeviceFacts
from torch_testing_ext._process import messages, terminal
from torch_testing_ext._process.channels import WithDescriptors
from torch_testing_ext._process.ends import describe_exit
from torch_testing_ext.runner.load_as import LoadAs
from torch_testing_ext.runner.model import Attempt, Test, TestEnd

# -- the description of one unit


@dataclass(frozen=True)
class UnitSpec:
    """The tests of a unit, their time-outs, and the places of its files."""

    number: int
    file: str  # absolute
    load_as: LoadAs
    root: str  # the working directory of the commands
    tests: tuple[str, ...]  # `Class.test_x`
    timeouts: tuple[float, ...]  # the time-out of each test
    commands: tuple[str, ...]  # that run each of them alone
    show_commands: tuple[str, ...]  # that show the account of its failure
    directory: Path
    ranks: Path  # holds a directory for each test that starts ranks
    environ: Mapping[str, str]  # variables that differ from those of the run

    @property
    def variables(self) -> dict[str, str]:
        """The variables in the form of `os.environ`: names of tests may have letters that the locale lacks."""
        return {name: terminal.to_variable(text) for name, text in self.environ.items()}

    @property
    def log(self) -> Path:
        """The output of the unit's own process."""
        return self.directory / "log"

    @property
    def stacks(self) -> Path:
        return self.directory / "stacks"

    @property
    def broke(self) -> Path:
        """The last message of a worker that cannot send it any more."""
        return self.directory / "broke"

    @property
    def reads(self) -> Path:
        """The record of the files that its processes read."""
        return self.directory / "reads"

    @property
    def session(self) -> Path:
        """The directory of the launch layer."""
        return self.directory / "session"

    def save(self) -> Path:
        """Write the specification to a file, for a worker that is a new interpreter."""
        file = self.directory / "unit"
        file.write_text(messages.to_json(self), encoding="utf-8")
        return file

    @classmethod
    def load(cls, file: Path) -> UnitSpec:
        spec: UnitSpec = messages.from_json(file.read_text(encoding="utf-8"), messages.by_name(cls))
        return spec


# -- to the preloaded server and the processes of files, which fork children on request


@dataclass(frozen=True)
class OpenFile(WithDescriptors):
    """Start the process of a test file. The descriptor becomes its channel."""

    number: int
    root: str
    path: str  # absolute
    file: str  # relative to the root
    devices: int  # the number of devices of the run
    log: str
    reads: str  # the record of the files that it reads
    load_as: LoadAs


@dataclass(frozen=True)
class CountDevices(WithDescriptors):
    """Start a process that counts the accelerators and answers through the descriptor."""

    number: int


@dataclass(frozen=True)
class FindFiles(WithDescriptors):
    """Start a process that asks pytest which files it collects, and answers through the descriptor."""

    number: int
    root: str
    load_as: LoadAs
    # The file for its output.
    log: str
    # The record of the files that it reads.
    reads: str


@dataclass(frozen=True)
class StartUnit(WithDescriptors):
    """Start a unit.

    The descriptors: the channel of its supervisor, unless that gets this, its worker's, and its locks.
    """

    number: int
    unit: UnitSpec


@dataclass(frozen=True)
class Kill:
    """Kill the child with this number."""

    number: int


@dataclass(frozen=True)
class PreloadModules:
    """Import modules that the next tests need: a worker, which sends this as a hint, had to import them itself."""

    modules: tuple[str, ...]


ToPreloadedServer: TypeAlias = OpenFile | CountDevices | FindFiles | StartUnit | Kill
ToFile: TypeAlias = StartUnit | PreloadModules | Kill


# -- from them


@dataclass(frozen=True)
class PreloadedServerReady:
    """The preloaded server has imported its modules and is ready, or not safe to fork for the reason `unsafe`."""

    unsafe: str | None


@dataclass(frozen=True)
class ChildGone:
    """The child with this number has ended, together with everything that it started; or it could not be started."""

    number: int
    status: int
    failure: str = ""  # why it could not be started

    @property
    def how(self) -> str:
        """Describe the end, to follow a subject: "exited with code 1"."""
        return self.failure or describe_exit(os.waitstatus_to_exitcode(self.status))


@dataclass(frozen=True)
class FileTests:
    """The tests of a file, and an error for each that cannot be run."""

    tests: tuple[Test, ...]
    not_run: tuple[Attempt, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileSkipped:
    """The file skips all of its tests. `want`: what it needs, if there are not enough devices."""

    reason: str
    want: str | None


@dataclass(frozen=True)
class FileReady:
    """The import is over: the process of the file is ready to fork, unless it has said that it is not safe."""


@dataclass(frozen=True)
class FileUnsafe:
    """The process of a file is not safe to fork, or no longer."""

    why: str


@dataclass(frozen=True)
class FileBroken:
    """The file cannot be imported."""

    failure: FailureView


@dataclass(frozen=True)
class DevicesCounted:
    """The kind of the accelerators ("cuda", "hip", "xpu", ...), and how many there are."""

    kind: str | None
    count: int
    torch: str = ""  # the version of torch
    uuids: tuple[str, ...] = ()  # the UUID of each; empty if they cannot be found out
    facts: tuple[DeviceFacts, ...] = ()  # likewise
    nccl: tuple[int, ...] = ()  # the version of NCCL
    backend: str = ""  # their own one
    why_none: str = ""  # why none of the devices can be used
    failure: str = ""  # why there is no answer


FromPreloadedServer: TypeAlias = PreloadedServerReady | ChildGone
FromFile: TypeAlias = FileTests | FileSkipped | FileReady | FileUnsafe | FileBroken | ChildGone


# -- to and from a supervisor


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


# -- from a worker. A test is identified by its index in the unit.


@dataclass(frozen=True)
class Began:
    """A test begins. `printed`: the length of the worker's log."""

    test: int
    at: float
    printed: int


@dataclass(frozen=True)
class Ended:
    """A test has ended. `ranks`: the directories of the ranks that it started."""

    test: int
    at: float
    end: TestEnd
    printed: int
    ranks: tuple[str, ...]


@dataclass(frozen=True)
class NotRun:
    """A test was left out: a class or module fixture that it needs failed or skips, or it is not in the file."""

    test: int
    at: float
    end: TestEnd


@dataclass(frozen=True)
class FailedSoFar:
    """The running test has failed already; its tear-down is still to come."""

    test: int
    end: TestEnd


@dataclass(frozen=True)
class FixtureBegan:
    """A class or module fixture begins: `setUpClass (module.T)`. `tests`: those that cannot run without it."""

    name: str
    at: float
    tests: tuple[int, ...]


@dataclass(frozen=True)
class FixtureEnded:
    """The fixture that was running has returned or raised. `leftovers`: what ranks that ended in it left running."""

    leftovers: tuple[str, ...] = ()


@dataclass(frozen=True)
class FixtureFailed:
    """A class or module tear-down failed. A set-up that fails is reported by NotRun."""

    failure: FailureView


@dataclass(frozen=True)
class AllOver:
    """Every test and fixture is over. A worker that has not sent this did not end properly, whatever its exit code."""

    leftovers: tuple[str, ...] = ()  # what ranks that ended after the last test left running


@dataclass(frozen=True)
class WorkerBroke:
    """An exception that unittest let through: KeyboardInterrupt, or an error of ours."""

    message: str


FromWorker: TypeAlias = (
    Began
    | FailedSoFar
    | Ended
    | NotRun
    | FixtureBegan
    | FixtureEnded
    | FixtureFailed
    | AllOver
    | WorkerBroke
    | PreloadModules
)


@dataclass(frozen=True)
class Nothing:
    """The message type of a direction in which no message is sent."""
