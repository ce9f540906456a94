"""The types of the values of pytest's fixtures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from torch_testing_ext._testing.bases.scripts import ScriptRun

if TYPE_CHECKING:
    from torch_testing_ext._testing.bases.traffic_blocks import SeenTraffic


@dataclass(frozen=True)
class Ranks:
    """One rank of a test, without a process group: the value of the fixture `ranks` in tests with ranks."""

    rank: int
    world_size: int
    # Its number among the ranks of its node, and that of the node.
    local_rank: int
    node: int
    device: torch.device
    # The number that the test has leased.
    devices: int = field(repr=False)


@dataclass(frozen=True)
class DistEnv(Ranks):
    """One rank of a test, with a process group over all of them: the value of the fixture `dist_env`."""

    backend: str
    # The rendezvous of the group, whose type torch does not export; None if the mark's `init` has made the group.
    store: Any = field(repr=False)

    @property
    def group(self) -> dist.ProcessGroup:
        """The default group. A property test makes another one for each example that fails."""
        group = dist.group.WORLD
        assert group is not None, "the test has destroyed the process group"
        return group


class Spawn(Protocol):
    """The function `spawn`, as the fixture of this name gives it."""

    def __call__(
        self,
        function: Callable[..., object],
        world_size: int,
        /,
        *args: Any,
        timeout: float | None = ...,
        backend: str | None = ...,
        devices: int | str | None = ...,
    ) -> None: ...


class RunScript(Protocol):
    """The function `run_script`, as the fixture of this name gives it."""

    def __call__(
        self,
        path: str | os.PathLike[str],
        /,
        *args: object,
        world_size: int = ...,
        devices: int | str | None = ...,
        env: Mapping[str, str] | None = ...,
        timeout: float | None = ...,
        launcher: str | None = ...,
    ) -> ScriptRun: ...


class Traffic(Protocol):
    """The function `traffic`, as the fixture of this name gives it."""

    def __call__(self, model: torch.nn.Module | None = ...) -> AbstractContextManager[SeenTraffic]: ...
