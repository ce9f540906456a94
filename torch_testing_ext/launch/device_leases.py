"""Leases of accelerators: no other test and no other program has them at the same time.

Marked functions, `spawn` and `run_script` lease them here; torchtest leases for its tests. All use the locks of
`_machine/device_locks.py`, in the same folder.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch_testing_ext._machine import device_sharing, visible_devices
from torch_testing_ext._machine.device_locks import DeviceLocks, lease_folder, leased_by_ancestors
from torch_testing_ext._process import setting_names
from torch_testing_ext._process.private_folders import UnsafeFolder
from torch_testing_ext._tests import notes

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import DeviceNeed


def are_shared(world_size: int) -> bool:
    """Whether ranks share devices, where there are this many of them: only if the user lets them."""
    from torch_testing_ext._machine import accelerators

    if device_sharing.RANKS_PER_GPU not in os.environ:
        return False
    return device_sharing.ranks_per_device() > 1 and 0 < accelerators.device_count() < world_size


# Seconds between attempts: a lock cannot be awaited. Random, so that two processes do not retry in lockstep.
_RETRY_INTERVAL = (0.02, 0.1)
# The seconds of waiting after which free devices are kept for this test.
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
    from torch_testing_ext._machine import accelerators

    count = accelerators.device_count() if are_shared(ranks) else ranks
    if not count:
        yield {}
        return
    kind, names, uuids = ("fake", tuple(fake), {}) if fake else _visible_devices()
    identities = {name: visible_devices.identity_of_device(kind, name, uuids) for name in names}
    locks = _open_locks(identities, owner, other_folder)
    try:
        chosen = _choose(locks, identities, count)
        if fake:
            shown = {setting_names.FAKE_DEVICES: ",".join(chosen)}
        elif set(chosen) == set(names):
            shown = {}
        else:
            shown = visible_devices.masks_for(chosen, kind)
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
    from torch_testing_ext._machine import accelerators

    kind = accelerators.runtime()
    if kind is None:
        return None, (), {}
    names = visible_devices.visible_names(os.environ, kind, accelerators.device_count())
    uuids = accelerators.device_uuids() if names else ()
    return kind, names, visible_devices.by_uuid(names, uuids)


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


@contextmanager
def variables_of(need: DeviceNeed, fake: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Lease what a test needs, and yield the variables by which its ranks see that and nothing else."""
    if need.count:
        with ExitStack() as stack:
            folder = need.other_folder or (lambda: Path(stack.enter_context(tempfile.TemporaryDirectory())))
            yield stack.enter_context(leased_devices(need.count, need.owner, folder, fake))
        return
    from torch_testing_ext._machine import accelerators

    are_hidden = need.are_hidden and accelerators.device_count() > 0
    yield visible_devices.masks_for((), accelerators.runtime()) if are_hidden else {}
