"""Locks on devices that all runs of a user on this machine share: one file for each device, locked by flock.

The kernel frees a lock when the last process that has it is gone. That is not only the runner: the supervisor of a
unit has it, too, so that a device stays locked until no process of the unit is left, even if the runner is killed.
When a unit has ended in order, the runner unlocks the file itself, whoever else has inherited the descriptor. Files
are never deleted, so no run can lock a file that another run has just replaced.

No run waits for a device while it keeps another one idle, with one exception, of which there is one at a time: the
run with the reservation keeps what it gets until its unit fits, and the others leave it those devices meanwhile. So
runs cannot wait for each other, and none waits for ever.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from torch_testing_ext._process import words
from torch_testing_ext._process.locks import OwnedFile
from torch_testing_ext._process.private_folders import make_private

# Set by the runner: which devices of this machine the test has leased, for runs that the test starts.
LEASED = "_TORCH_TESTING_EXT_LEASED"
# The folder of the locks, where it is not the default: of the user of pytest, or of the fake accelerators of a run.
LEASE_FOLDER = "_TORCH_TESTING_EXT_LEASE_FOLDER"
_RESERVATION = "reservation"


def default_folder() -> Path:
    """The same for all runs of this user, whatever their TMPDIR is."""
    base = Path("/tmp")
    if not base.is_dir():
        base = Path(tempfile.gettempdir())
    return base / f"torch_testing_ext-leases-{os.getuid()}"


def lease_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the locks: the one that the user has named, or the default."""
    named = environ.get(LEASE_FOLDER)
    return Path(named) if named else default_folder()


def leased_by_ancestors(environ: Mapping[str, str]) -> frozenset[str]:
    """The identities of devices that a run which started this one has leased for it."""
    identities = environ.get(LEASED, "").split(",")
    return frozenset(filter(None, identities))


def leased_for(identities: Iterable[str], ancestors: Collection[str]) -> dict[str, str]:
    """The environment variable that tells a process which devices are leased for it."""
    return {LEASED: ",".join(sorted({*ancestors, *identities}))}


class DeviceLocks:
    """The locks of one run. `identities`: what identifies each device on this machine, by its name in this run."""

    def __init__(self, folder: Path, identities: Mapping[str, str], owner: str, ancestors: Collection[str] = ()):
        """Raises OSError or UnsafeFolder. Later nothing does: all files are open then."""
        make_private(folder)
        self._identities = identities
        self._owner = owner
        self._ancestors = ancestors
        self._files = {name: _lock_file(folder, identity) for name, identity in identities.items()}
        self._locked: set[str] = set()
        self._reservation = _lock_file(folder, _RESERVATION)
        self._has_reservation = False

    def acquire(self, name: str) -> bool:
        """Lock a device, unless another run has locked it. It may be locked by this run already."""
        if name in self._locked or self._identities[name] in self._ancestors:
            return True
        if not self._files[name].try_lock(self._owner):
            return False
        self._locked.add(name)
        return True

    def release(self, name: str) -> None:
        """Unlock a device, which no process uses any more."""
        if name in self._locked:
            self._locked.remove(name)
            self._files[name].unlock()

    def descriptors(self, names: Iterable[str]) -> tuple[int, ...]:
        """The descriptors that keep devices locked, for the process that owns everything that uses them."""
        return tuple(self._files[name].fd for name in names if name in self._locked)

    def leased(self, names: Iterable[str]) -> dict[str, str]:
        """The environment variable that tells runs inside a unit which devices are leased for them."""
        return leased_for(map(self._identities.__getitem__, names), self._ancestors)

    def owner_of(self, name: str) -> str:
        """Names the run that has locked a device, in words; empty if it does not say."""
        return self._files[name].owner().strip()

    # -- the reservation

    def reserve(self) -> bool:
        """Have other runs leave the devices to this one, unless another run has the reservation."""
        wanted = json.dumps(list(self._identities.values()))
        self._has_reservation = self._has_reservation or self._reservation.try_lock(wanted)
        return self._has_reservation

    def end_reservation(self) -> None:
        if self._has_reservation:
            self._has_reservation = False
            self._reservation.unlock()

    def reserved_by_others(self) -> frozenset[str]:
        """The names of devices that another run has reserved. Those of ancestors are in use: it waits for their end."""
        if self._has_reservation or not self._reservation.is_locked():
            return frozenset()
        try:
            reserved = set(json.loads(self._reservation.owner()))
        except ValueError:
            # The file is being written.
            reserved = set(self._identities.values())
        reserved.difference_update(self._ancestors)
        return frozenset(name for name, identity in self._identities.items() if identity in reserved)

    def close(self) -> None:
        self.end_reservation()
        for name in list(self._locked):
            self.release(name)
        for file in (*self._files.values(), self._reservation):
            file.close()


def _lock_file(folder: Path, identity: str) -> OwnedFile:
    """The file to lock for a device. Its content is for people; that of the reservation is for runs."""
    readable = words.file_name(identity)[:100]
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return OwnedFile(folder / (readable if readable == identity.lstrip(".") else f"{readable}-{digest}"))
