"""Creation of a process group, accelerators that ranks share, and groups that do not communicate."""

from __future__ import annotations

import fcntl
import functools
import os
import random
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._machine import accelerators, device_rules
from torch_testing_ext._machine.device_rules import uses_nccl
from torch_testing_ext._machine.machine_resources import DeviceLocks, lease_folder, leased_by_ancestors
from torch_testing_ext._process import notes
from torch_testing_ext._process.private_folders import UnsafeFolder
from torch_testing_ext._testing.helpers.contexts import within
from torch_testing_ext._testing.marks.needs import TEST_SKIPS, Skipped, TestSkip
from torch_testing_ext._torch.devices import cuda_state
from torch_testing_ext._torch.groups import fake_groups, watched_groups
from torch_testing_ext.launch import RankContext, environment
from torch_testing_ext.launch.in_rank import context_here
from torch_testing_ext.launch.own_report import is_of_lost_peer

# --------------------------------------------------------------------------------------------------------------------
# Keeps a rank from leaving while its peers still create a process group that it has created already.
#
# Ranks create a group together, but none learns when the others are done. A rank exits as soon as its test is over,
# much sooner than an interpreter, and so would close its connections, and perhaps the store, while a peer is still
# connecting.
#
# A rank holds a lock of a file while it creates a group; the kernel releases it if the rank dies. Before a rank
# exits, it waits for the locks of its peers, for the groups that it has created itself: its peers have all begun to
# create these.

# A peer that takes longer does not connect: it waits for a rank that will not come.
PEERS_TIMEOUT = 20.0
_FIRST_STEP, _LAST_STEP = 0.0005, 0.1
# Each rank has a byte of its own in the range of each group.
_MOST_RANKS = 1 << 12
_MOST_TIMES = 1 << 12


def announce_creation(context: RankContext) -> None:
    """Let the peers of a rank know from now on while it creates groups."""
    if context.rank < _MOST_RANKS:
        context.group_creation = GroupCreation(context.directory / "creating", context.rank)
        watch_creation()


@functools.cache
def watch_creation() -> None:
    """Note all process groups that this process and its forks make."""
    watched_groups.watch_process_groups(_creating, is_of_lost_peer)


def _creating(name: str) -> AbstractContextManager[None]:
    own = _of_this_process()
    return nullcontext() if own is None else own.creating(name)


def wait_for_peers() -> None:
    """Before we end the rank or its groups: wait until no peer is creating a group that this rank has created."""
    if (own := _of_this_process()) is not None:
        own.wait_for_peers()


def _of_this_process() -> GroupCreation | None:
    """A process that a test forks has none: it may create groups with other processes."""
    context = context_here()
    return None if context is None else context.group_creation


class GroupCreation:
    """The groups that one rank creates, and the locks by which its peers know."""

    def __init__(self, file: Path, rank: int):
        self._file = file
        self._rank = rank
        # How often each group's name was used: destroyed groups give it free.
        self._times: Counter[str] = Counter()
        # Ranges of the groups that this rank has created since it last waited.
        self.created: list[int] = []

    @contextmanager
    def creating(self, name: str) -> Iterator[None]:
        """Hold the lock of a group while this rank creates it."""
        group = _range_of(name, self._times[name])
        self._times[name] += 1
        # A peer that looks holds a lock for a moment.
        descriptor = self.lock(fcntl.LOCK_EX, group + self._rank, 1)
        try:
            yield
            self.created.append(group)
        finally:
            _close(descriptor)

    def wait_for_peers(self) -> None:
        """Wait until no peer is creating a group that this rank has created."""
        groups, self.created = self.created, []
        began = time.monotonic()
        while groups and (waited := time.monotonic() - began) < PEERS_TIMEOUT:
            if self.is_complete(groups[-1]):
                groups.pop()
            else:
                # Longer steps the longer it takes: many ranks that wait must not keep the others from creating it.
                time.sleep(min(max(_FIRST_STEP, waited / 8), _LAST_STEP))

    def is_complete(self, group: int) -> bool:
        """Is no peer creating the group?"""
        try:
            _close(self.lock(fcntl.LOCK_SH | fcntl.LOCK_NB, group, _MOST_RANKS))
        except BlockingIOError:
            return False
        return True

    def lock(self, kind: int, start: int, length: int) -> int | None:
        """Lock a part of the file; return the descriptor that holds the lock, or None if the file cannot be locked.

        Raises BlockingIOError if a peer holds the lock and `kind` says not to wait.
        """
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, kind, length, start)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            # No locks on this file system, or a deadlock: then nobody waits.
            os.close(descriptor)
            return None
        return descriptor


def _range_of(name: str, times: int) -> int:
    return (zlib.crc32(name.encode()) * _MOST_TIMES + times % _MOST_TIMES) * _MOST_RANKS


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        with suppress(OSError):
            os.close(descriptor)


# --------------------------------------------------------------------------------------------------------------------
# Ranks that share accelerators, as the user has asked: the device, the backend and the memory of each.
#
# All of this happens when a rank first uses CUDA: a test on the CPU never touches a device. The rules are in
# `_machine/device_rules.py`.


def are_shared(world_size: int) -> bool:
    """Do ranks share devices, where there are this many of them? Only if the user lets them."""
    if device_rules.RANKS_PER_GPU not in os.environ:
        return False
    return device_rules.ranks_per_device() > 1 and 0 < accelerators.device_count() < world_size


def backend_of_shared_devices() -> str:
    return device_rules.shared_backend(cuda_state.nccl_version(), torch.version.hip is not None)


def backend_of(kind: str, world_size: int) -> str:
    """Return the default backend for devices of this kind, also if the ranks share them."""
    if kind == "cuda" and are_shared(world_size):
        return backend_of_shared_devices()
    return str(dist.get_default_backend_for_device(kind))


def check_backend(name: str, world_size: int) -> None:
    """Skip a test that names NCCL itself, where its ranks share devices and NCCL does not allow that."""
    if uses_nccl(name) and are_shared(world_size) and backend_of_shared_devices() != "nccl":
        version = ".".join(map(str, cuda_state.nccl_version())) or "of this torch"
        why = f"NCCL {version} does not let {world_size} ranks share {accelerators.device_count()} GPU(s)"
        raise Skipped(TestSkip(TEST_SKIPS["generic"].exit_code, why))


def prepare_shared_devices(rank: int, world_size: int) -> None:
    """In a new rank: prepare for devices that it shares with other ranks."""
    kind = accelerators.accelerator_type()
    if kind is None or kind == "xpu" or not are_shared(world_size):
        return
    devices = accelerators.device_count()
    cuda_state.fold_device_numbers(devices, kind)
    if kind != "cuda":
        # Its own backend has to let ranks share, and its allocator their memory.
        return
    ranks = device_rules.ranks_on_device(rank, world_size, devices)
    chosen = backend_of_shared_devices()
    if chosen == "nccl":
        os.environ[device_rules.NCCL_SHARES] = "1"
        # NCCL refuses such ranks if it must use NVLS.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        os.environ.setdefault("NCCL_MAX_CTAS", str(device_rules.blocks_for(ranks)))
    else:
        names: Any = dist.Backend.default_device_backend_map
        # For groups whose backend is left to torch.
        names["cuda"] = chosen
        cuda_state.gather_lists_one_by_one()
    own = device_rules.device_of(rank, devices)

    def at_first_use() -> None:
        torch.cuda.set_device(own)
        total = torch.cuda.get_device_properties(own).total_memory
        torch.cuda.set_per_process_memory_fraction(device_rules.fraction_for(total, ranks), own)

    cuda_state.when_cuda_is_first_used(at_first_use)


# --------------------------------------------------------------------------------------------------------------------
# Leases of accelerators: no other test and no other program has them at the same time.
#
# Tests of pytest that have ranks lease them here, and so do the ranks of `spawn` and `run_script`; run_test.py leases
# for its tests. All use the locks of `_machine/machine_resources.py`, in the same folder.

# Seconds between attempts: a lock cannot be awaited. Random, so that two processes do not retry in lockstep.
_RETRY_INTERVAL = (0.02, 0.1)
# In seconds.
_RESERVE_AFTER = 2.0


class _LeasedHere(threading.local):
    """Knows what this thread has leased: that cannot become free while the thread waits, and nothing of it runs then.

    Ranks that the tests of a class share are idle while a test beside them uses the same devices.
    """

    def __init__(self) -> None:
        self.identities: list[str] = []


_leased_here = _LeasedHere()


@contextmanager
def leased_devices(
    ranks: int, owner: str, other_folder: Callable[[], Path], fake: Sequence[str] = ()
) -> Iterator[dict[str, str]]:
    """Lease devices for these ranks, as soon as they are free. Yields the environment variables of the ranks.

    No process of the ranks may be left when the lease ends. `owner`: in words, for those who wait. `other_folder`: for
    the locks, where the folder of this user cannot be used. `fake`: names of devices in place of those that exist.
    """
    count = accelerators.device_count() if are_shared(ranks) else ranks
    if not count:
        yield {}
        return
    kind, names, uuids = ("fake", tuple(fake), {}) if fake else _visible_devices()
    identities = {name: device_rules.identity_of_device(kind, name, uuids) for name in names}
    locks = _open_locks(identities, owner, other_folder)
    try:
        chosen = _choose(locks, identities, count)
        if fake:
            shown = {environment.PREFIX + "FAKE_DEVICES": ",".join(chosen)}
        elif set(chosen) == set(names):
            shown = {}
        else:
            shown = device_rules.masks_for(chosen, kind)
        leased = [identities[name] for name in chosen]
        _leased_here.identities += leased
        try:
            yield {**shown, **locks.leased(chosen)}
        finally:
            for identity in leased:
                _leased_here.identities.remove(identity)
    finally:
        locks.close()


def _visible_devices() -> tuple[str | None, tuple[str, ...], Mapping[str, str]]:
    """The kind, the names and the UUIDs of the devices that this process may use."""
    kind = accelerators.runtime()
    if kind is None:
        return None, (), {}
    names = device_rules.visible_names(os.environ, kind, accelerators.device_count())
    uuids = accelerators.device_uuids() if names else ()
    return kind, names, device_rules.by_uuid(names, uuids)


def _open_locks(identities: Mapping[str, str], owner: str, other_folder: Callable[[], Path]) -> DeviceLocks:
    """Open locks in the folder of this user; if that cannot be used, in another one."""
    ancestors = leased_by_ancestors(os.environ)
    try:
        return DeviceLocks(lease_folder(os.environ), identities, owner, ancestors)
    except (OSError, UnsafeFolder) as error:
        warnings.warn(f"other runs may use the same devices at the same time: {error}", stacklevel=1)
        return DeviceLocks(other_folder(), identities, owner, ancestors)


def _choose(locks: DeviceLocks, identities: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Lock devices, and wait until there are enough. Only the process with the reservation keeps some meanwhile.

    A thread that has leased some keeps those, too: it does not wait for another one that does the same.
    """
    began = time.monotonic()
    has_told = False
    own = [name for name, identity in identities.items() if identity in _leased_here.identities]
    while True:
        waits_long = time.monotonic() - began > _RESERVE_AFTER
        has_reservation = waits_long and locks.reserve()
        reserved = locks.reserved_by_others()
        got: list[str] = []
        for name in identities:
            if len(got) < count and name not in reserved and locks.acquire(name):
                got.append(name)
        # The free ones first.
        got += [name for name in own if name not in got][: count - len(got)]
        if len(got) < count and waits_long and reserved.intersection(own):
            # Another one waits, and would do so for ever for what this thread has. If it has some, they are idle, too.
            notes.warn_user(f"sharing {count} of {len(identities)} devices with tests that wait for this one")
            got += [name for name in identities if name not in got][: count - len(got)]
        if len(got) == count:
            locks.end_reservation()
            return tuple(got)
        if waits_long and not has_told:
            owners = filter(None, (locks.owner_of(name) for name in identities if name not in got))
            used_by = "; ".join(dict.fromkeys(owners)) or "another run"
            notes.warn_user(f"waiting for {count} of {len(identities)} devices, used by {used_by}")
            has_told = True
        if not has_reservation:
            for name in got:
                locks.release(name)
        time.sleep(random.uniform(*_RETRY_INTERVAL))


# --------------------------------------------------------------------------------------------------------------------
# Process groups for code that only needs one to exist: without collectives, or with ones that do nothing.
#
# The fake group acts as any rank of a world of any size: its collectives return at once and their results mean nothing.

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


FakeProcessGroup = fake_groups.fake_process_group()
_Store: Any = dist.Store  # type: ignore[attr-defined, unused-ignore]  # missing in the stubs of some versions


class FakeStore(_Store):  # type: ignore[misc, unused-ignore]
    """A store that keeps nothing, for `init_process_group(backend="fake", store=FakeStore(), ...)`."""


fake_groups.register_fake_backend()
