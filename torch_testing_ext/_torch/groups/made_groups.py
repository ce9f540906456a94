"""The log of the process groups that this process has made."""

import math
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class MadeGroup:
    """A process group that this process has made. `index`: its own place among the `members`.

    `world` tells groups of different worlds with the same names apart, by the store that they have met at. `made_at`:
    in nanoseconds since 1970, as the recorder has them. `backend`: as torch has it, such as "cpu:gloo,cuda:nccl".
    `is_reconfigured`: a group of this name got other members, as this one.
    """

    name: str
    description: str
    members: tuple[int, ...]
    index: int
    world: str
    made_at: int
    backend: str = ""
    timeout: float = math.inf
    is_reconfigured: bool = False

    @property
    def fields(self) -> tuple[str, str, tuple[int, ...], int, str, bool, int]:
        """The part of it that a rank leaves."""
        return self.name, self.description, self.members, self.index, self.world, self.is_reconfigured, self.made_at


class GivenMembers(NamedTuple):
    """The members that this process, a member or not, has given for a group that all ranks make. `place`: its line."""

    name: str
    world: str
    members: tuple[int, ...]
    place: tuple[str, int, str] | None


noted_groups: list[MadeGroup] = []
noted_lists: list[GivenMembers] = []
groups_in_creation: list[MadeGroup] = []
numbers_of_groups: weakref.WeakKeyDictionary[Any, int] = (
    weakref.WeakKeyDictionary()
)  # by group: its place in `noted_groups`


def made_groups() -> list[MadeGroup]:
    """The process groups that this process has made, in order."""
    return list(noted_groups)


def count_of_groups() -> int:
    """The number of groups that this process has made so far."""
    return len(noted_groups)


def timeout_of_store(owners: Iterable[Any] | None, timeout: float | None = None) -> float | None:
    """The seconds after which a wait at a store ends; None if this process does not wait at one.

    `timeout`: of this wait, if it has one of its own. `owners`: the objects of which it may call a method that stores
    have; the default store is one, too. None if it does not call any. A group of gloo waits for its members as long as
    its own time-out says, and not that of the store. `_get_default_store`, `Store.timeout`: 2.11 to 2.15.
    """
    if not groups_in_creation and owners is None:
        return None
    if owners is None and all(creation.backend == "gloo" for creation in groups_in_creation):
        return min(creation.timeout for creation in groups_in_creation)
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    # `isinstance` reads an attribute of an owner that is no store, and deprecated names of torch warn about that.
    stores = [owner for owner in owners or () if issubclass(type(owner), c10d.Store)]
    if dist.is_initialized():
        stores.append(c10d._get_default_store())
    ends = [float(store.timeout.total_seconds()) if timeout is None else timeout for store in stores]
    return min([*ends, *(creation.timeout for creation in groups_in_creation)], default=None)


# SEND, RECV, RECVANYSOURCE and COALESCED of `OpType` in C++, which has no names in Python: 2.11 to 2.15.
_OF_MESSAGES = (12, 13, 14, 17)


def is_of_collective(work: Any) -> bool:
    """Whether this is the work of a collective: not of a message, nor of a backend in Python, and no other object.

    `_get_op_type`: 2.11 to 2.15.
    """
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    return type(work) is c10d.Work and int(work._get_op_type()) not in _OF_MESSAGES


def group_in_creation() -> MadeGroup | None:
    """The process group that this process is making."""
    return groups_in_creation[-1] if groups_in_creation else None


def living_groups() -> list[int]:
    """The places in `made_groups` of the groups that this process has not destroyed. `_world.pg_map`: 2.11 to 2.15."""
    import torch.distributed as dist

    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return [numbers_of_groups[group] for group in groups if group in numbers_of_groups]


def number_of_group(group: Any) -> int | None:
    """The place of a process group in `made_groups`."""
    return numbers_of_groups.get(group)


def timeout_of_group(group: Any) -> float | None:
    """The time-out of a group's operations in seconds, the shortest of its backends; None if unknown.

    `ProcessGroup._get_backend`, `ProcessGroup._device_types`, `Backend.options`: 2.11 to 2.15.
    """
    found = []
    for device in getattr(group, "_device_types", ()):
        with suppress(RuntimeError, AttributeError):
            found.append(float(group._get_backend(device).options._timeout.total_seconds()))
    return min(found, default=None)
