"""Leases the accelerators of one test, so that no other test has them at the same time.

Other tests may run in other workers of pytest-xdist, in another pytest, or under run_test.py: all of them use the locks
of `_machine/device_locks.py`, in the same folder.
"""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_testing_ext._cases import shared_devices
from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.device_locks import DeviceLocks, default_folder, leased_by_ancestors
from torch_testing_ext._machine.visible_devices import by_uuid, identity, masks_for, visible_names
from torch_testing_ext._process.private_folders import UnsafeFolder
from torch_testing_ext.launch import settings

from . import pytest_internals

# Seconds between attempts: a lock cannot be awaited. Random, so that two processes do not retry in lockstep.
_RETRY_INTERVAL = (0.02, 0.1)
# In seconds.
_RESERVE_AFTER = 2.0


@contextmanager
def leased(item: Any, ranks: int, fake: Sequence[str]) -> Iterator[dict[str, str]]:
    """Lease devices for these ranks of a test, as soon as they are free. Yields the environment variables of its ranks.

    No process of the test may be left when the lease ends. `fake`: names of devices in place of those that exist.
    """
    count = accelerators.device_count() if shared_devices.are_shared(ranks) else ranks
    if not count:
        yield {}
        return
    kind, names, uuids = ("fake", tuple(fake), {}) if fake else _visible_devices()
    locks = _open_locks(item, {name: identity(kind, name, uuids) for name in names})
    try:
        chosen = _choose(locks, names, count)
        if fake:
            shown = {settings.PREFIX + "FAKE_DEVICES": ",".join(chosen)}
        elif set(chosen) == set(names):
            shown = {}
        else:
            shown = masks_for(chosen, kind)
        yield {**shown, **locks.leased(chosen)}
    finally:
        locks.close()


def _visible_devices() -> tuple[str | None, tuple[str, ...], Mapping[str, str]]:
    """The kind, the names and the UUIDs of the devices that this process may use."""
    kind = accelerators.runtime()
    if kind is None:
        return None, (), {}
    names = visible_names(os.environ, kind, accelerators.device_count())
    uuids = accelerators.device_uuids() if names else ()
    return kind, names, by_uuid(names, uuids)


def _open_locks(item: Any, identities: Mapping[str, str]) -> DeviceLocks:
    """Open locks in the folder of this user; if that cannot be used, in one of this session of pytest."""
    folder = item.config.getoption("dist_lease_folder", None)
    owner = f"pid {os.getpid()}: pytest, {item.nodeid}"
    ancestors = leased_by_ancestors(os.environ)
    try:
        return DeviceLocks(Path(folder) if folder else default_folder(), identities, owner, ancestors)
    except (OSError, UnsafeFolder) as error:
        warnings.warn(f"other runs may use the same devices at the same time: {error}", stacklevel=1)
        return DeviceLocks(_folder_of_session(item.config), identities, owner, ancestors)


def _folder_of_session(config: Any) -> Path:
    """Return a folder that all workers of pytest-xdist share."""
    base = pytest_internals.temporary_base(config)
    is_worker = hasattr(config, "workerinput")
    shared = base.parent if is_worker else base
    return shared / "torch_testing_ext-leases"


def _choose(locks: DeviceLocks, names: Sequence[str], count: int) -> tuple[str, ...]:
    """Lock devices, and wait until there are enough. Only the process with the reservation keeps some meanwhile."""
    began = time.monotonic()
    while True:
        has_reservation = time.monotonic() - began > _RESERVE_AFTER and locks.reserve()
        reserved = locks.reserved_by_others()
        got: list[str] = []
        for name in names:
            if len(got) < count and name not in reserved and locks.acquire(name):
                got.append(name)
        if len(got) == count:
            locks.end_reservation()
            return tuple(got)
        if not has_reservation:
            for name in got:
                locks.release(name)
        time.sleep(random.uniform(*_RETRY_INTERVAL))
