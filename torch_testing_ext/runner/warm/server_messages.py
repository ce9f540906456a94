"""The messages between a run and the warm server of its project. A connection is open as long as its run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch_testing_ext._process.channels import WithDescriptors


@dataclass(frozen=True)
class CheckFiles:
    """The server is to look whether the files that it has read have changed: Fresh or Stale."""


@dataclass(frozen=True, kw_only=True)
class StartRun(WithDescriptors):
    """The server is to fork the preloaded server of the run. `fds`: its channel, its log and its working folder."""

    # The folder of the run.
    directory: str
    # What it is to have imported.
    modules: tuple[str, ...]
    environ: Mapping[str, str]


@dataclass(frozen=True)
class KillRun:
    """The server is to kill the preloaded server of the run."""


@dataclass(frozen=True)
class StopServer:
    """The server is to end, as soon as no run uses it: ServerStops."""


ToWarmServer = CheckFiles | StartRun | KillRun | StopServer


@dataclass(frozen=True)
class Fresh:
    """The server can start a run."""


@dataclass(frozen=True)
class Stale:
    """Files that the server has read have changed. It ends."""


@dataclass(frozen=True)
class ServerStops:
    """The server takes no run any more."""


@dataclass(frozen=True)
class ForkEnded:
    """The preloaded server of the run has ended, with this wait status."""

    status: int


FromWarmServer = Fresh | Stale | ServerStops | ForkEnded
