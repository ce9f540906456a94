"""The watch on process groups: each is noted when it is made, with its messages and errors."""

import functools
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch_testing_ext._torch import replacing
from torch_testing_ext._torch.torch_frames import program_places

from . import group_creators
from .collective_errors import errors
from .flight_recorder import backends_of, forget_collectives, latest, use_recorders, used_up
from .gloo_messages import through_gloo, watch_messages
from .made_groups import GivenMembers, MadeGroup, groups_in_creation, noted_groups, noted_lists, numbers_of_groups
from .roots_of_calls import watch_roots

# Taken before a test could replace it.
_now = time.time_ns


def forget_groups() -> None:
    """Forget all groups, and collectives, that this process has made so far: they are not those of its ranks."""
    forget_collectives()
    noted_groups.clear()
    noted_lists.clear()
    numbers_of_groups.clear()
    through_gloo.clear()
    latest.clear()
    used_up.clear()
    errors.forget()


def watch_process_groups(
    creating: Callable[[str], AbstractContextManager[object]], is_of_lost_peer: Callable[[BaseException], bool]
) -> None:
    """From now on, create each process group within `creating(name)`, and note it; note messages and errors, too.

    `is_of_lost_peer`: does an error say that another rank has ended?

    `distributed_c10d._world`: 2.11 to 2.15.
    """
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d

    def create_watched(arguments: dict[str, Any], create: Callable[[], Any]) -> Any:
        began = _now()
        _note_list(arguments)
        nan_check = _nan_check(str(arguments.get("backend", "")))
        with creating(str(arguments["group_name"])), nan_check, _noted_as_in_creation(arguments, began):
            made = create()
        group = group_creators.group_of_member(made)
        if group is not None:
            numbers_of_groups[group] = len(noted_groups)
            backend = str(c10d._world.pg_map.get(group, ("",))[0])
            noted_groups.append(_described(arguments, backend, began))
            use_recorders(backends_of(group, backend))
        return made

    group_creators.take_part(create_watched)
    replacing.replace_for_good("stores of worlds", _watched_rendezvous)
    replacing.replace_for_good("new members of groups", _watched_reconfigure)
    watch_messages()
    watch_roots()
    errors.watch(is_of_lost_peer)


def note_living_groups() -> None:
    """Note the groups that this process has made before it was watched. `_world.pg_map`, `pg_names`: 2.11 to 2.15."""
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    for group in list(c10d._world.pg_map) if dist.is_initialized() else ():
        if group not in numbers_of_groups:
            members = tuple(dist.get_process_group_ranks(group))
            is_default = group is dist.group.WORLD
            description = "default_pg" if is_default else str(group.group_desc)
            name = str(c10d._world.pg_names[group])
            numbers_of_groups[group] = len(noted_groups)
            noted_groups.append(MadeGroup(name, description, members, dist.get_rank(group), "", _now()))


def _watched_rendezvous(_: str, create_store: Callable[..., Any]) -> Callable[..., Any]:
    """Note a world that this rank joins while it connects to its server, or while the server waits for the others.

    `_create_c10d_store`, `_world.group_count`: 2.11 to 2.15.
    """
    import torch.distributed as dist

    signature = inspect.signature(create_store)
    c10d: Any = dist.distributed_c10d

    @functools.wraps(create_store)
    def create_store_watched(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if not given.keys() >= {"port", "rank", "world_size", "timeout"}:
            # The program has put a function of its own in the place of torch's.
            return create_store(*args, **kwargs)
        # The default group has got its name before.
        name, members, ends = str(c10d._world.group_count - 1), tuple(range(given["world_size"])), given["timeout"]
        world, timeout = str(given["port"]), float(ends.total_seconds())
        with _in_creation(MadeGroup(name, "default_pg", members, given["rank"], world, _now(), timeout=timeout)):
            return create_store(*args, **kwargs)

    return create_store_watched


def _watched_reconfigure(_: str, reconfigure: Callable[..., Any]) -> Callable[..., Any]:
    """Note the new members of a group that is reconfigured. `ProcessGroup.reconfigure`: 2.15."""

    @functools.wraps(reconfigure)
    def reconfigure_watched(group: Any, options: Any) -> Any:
        work = reconfigure(group, options)
        number = numbers_of_groups.get(group)
        if number is not None:
            # This process knows no other member of a group that is still on its way.
            is_over = work.is_completed()
            size, index = (group.size(), group.rank()) if is_over else (1, 0)
            known = replace(noted_groups[number], members=tuple(range(size)), index=index, made_at=_now())
            numbers_of_groups[group] = len(noted_groups)
            noted_groups.append(replace(known, world=str(options.uuid), is_reconfigured=True))
        return work

    return reconfigure_watched


@contextmanager
def _nan_check(backend: str) -> Iterator[None]:
    """While a group of NCCL is made: let `TORCH_NCCL_NAN_CHECK` count for its new backend, too, which has another name.

    `TORCH_DIST_NAN_CHECK`: 2.15. Other backends leave NaN to the sanitizer, which knows the line.
    """
    name = "TORCH_DIST_NAN_CHECK"
    if os.environ.get("TORCH_NCCL_NAN_CHECK") != "1" or name in os.environ or "nccl" not in backend.lower():
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _note_list(arguments: dict[str, Any]) -> None:
    """Note the members that are given for a group. One that only its members make has a hash as its name."""
    name, members = str(arguments["group_name"]), tuple(arguments["global_ranks_in_group"])
    if members and name.isdecimal():
        place = next(program_places(sys._getframe(2)), None)
        noted_lists.append(GivenMembers(name, _world_of(arguments["store"]), members, place))


def _noted_as_in_creation(arguments: dict[str, Any], began: int) -> AbstractContextManager[None]:
    """A rank that is no member has no number there, and does not wait for the others."""
    is_member = arguments.get("group_rank") is not None
    backend = str(arguments.get("backend", ""))
    return _in_creation(_described(arguments, backend, began)) if is_member else nullcontext()


@contextmanager
def _in_creation(group: MadeGroup) -> Iterator[None]:
    groups_in_creation.append(group)
    try:
        yield
    finally:
        groups_in_creation.remove(group)


def _described(arguments: dict[str, Any], backend: str, began: int) -> MadeGroup:
    members = tuple(arguments["global_ranks_in_group"])
    description = arguments.get("group_desc") or ("" if members else "default_pg")
    members = members or tuple(range(arguments["group_size"]))
    name, index, world = str(arguments["group_name"]), int(arguments["group_rank"]), _world_of(arguments["store"])
    timeout = arguments.get("timeout")
    ends = math.inf if timeout is None else float(timeout.total_seconds())
    return MadeGroup(name, str(description), members, index, world, began, backend, ends)


def _world_of(store: Any) -> str:
    """The part of their store that ranks of one world know alike. `_underlying_non_prefix_store`: 2.11 to 2.15."""
    from torch._C import _distributed_c10d as stores

    if isinstance(store, stores.PrefixStore):
        store = store._underlying_non_prefix_store  # type: ignore[attr-defined]
    if isinstance(store, stores.FileStore):
        return os.path.realpath(str(store.path))  # type: ignore[attr-defined]
    return str(store.port) if isinstance(store, stores.TCPStore) else type(store).__name__
