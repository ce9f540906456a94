"""Process groups for code that only needs one to exist: without collectives, or with ones that do nothing.

The fake group acts as any rank of a world of any size: its collectives return at once and their results mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_testing_ext._testing.helpers.contexts import within
from torch_testing_ext._torch.groups import dataless_groups

_ProcessGroup: Any = dist.ProcessGroup
_HashStore: Any = dist.HashStore  # type: ignore[attr-defined, unused-ignore]  # from C++


class MockProcessGroup(_ProcessGroup):  # type: ignore[misc, unused-ignore]
    """A process group without collectives."""

    def getBackendName(self) -> str:
        return "mock_process_group"


def create_mock_pg(prefix_store: Any, rank: int, world_size: int, timeout: timedelta) -> MockProcessGroup:
    return MockProcessGroup(rank, world_size)


dist.Backend.register_backend("mock_process_group", create_mock_pg, devices=["cpu", "cuda", "xpu"])


def mock_init_dist(rank: int, world_size: int) -> None:
    """Make a mock group the default group."""
    if dist.is_initialized():
        raise AssertionError("a default process group exists already; destroy it first")
    dist.init_process_group(
        backend="mock_process_group",
        rank=rank,
        world_size=world_size,
        store=_HashStore(),
        group_name="fake",
        timeout=timedelta(seconds=1),
    )


@contextmanager
def with_dist(rank: int = 0, world_size: int = 2) -> Iterator[None]:
    """Be rank `rank` of `world_size` for the length of a `with`."""
    mock_init_dist(rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def with_fake_comms(func: Any = None, rank: int = 0, world_size: int = 2) -> Any:
    """Decorator, with or without arguments: run a test method as rank `rank` of `world_size`."""
    decorate = within(lambda: with_dist(rank, world_size))
    return decorate if func is None else decorate(func)


FakeProcessGroup = dataless_groups.fake_process_group()
_Store: Any = dist.Store  # type: ignore[attr-defined, unused-ignore]  # missing in the stubs of some versions


class FakeStore(_Store):  # type: ignore[misc, unused-ignore]
    """A store that keeps nothing, for `init_process_group(backend="fake", store=FakeStore(), ...)`."""


dataless_groups.register_fake_backend()
