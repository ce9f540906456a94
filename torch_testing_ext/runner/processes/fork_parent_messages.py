"""The messages to and from the processes that fork children: the preloaded server, and those of files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._machine.device_needs import DeviceFacts
from torch_testing_ext._process.channels import WithDescriptors
from torch_testing_ext._process.ends import describe_exit
from torch_testing_ext.runner.load_as import LoadAs
from torch_testing_ext.runner.model import Attempt, Test

from .unit_spec import UnitSpec


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


@dataclass(frozen=True)
class Nothing:
    """The message type of a direction in which no message is sent."""
