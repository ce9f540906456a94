"""Lockstep: before a rank runs a program that the others may not expect, all ranks compare their programs.

All ranks know which program comes next: the one that followed the last time, after as many runs of the program before,
or else the same one again. A rank with this program runs it without a word. Any other rank declines by the flag in the
program's first collective (see `lower/handshake.py`). Then all ranks, those that run the program included, exchange
what they have, and continue if it is the same on all of them: the same collectives, and the same updates of what they
share. Programs without either do not count.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from ..lower.handshake import Handshake, look_at_sum
from .agreement import Proposal, agree

# A program that runs up to this often before another one does is expected to do so again, as in gradient accumulation.
_LONGEST_RUN = 64

_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Lockstep] = weakref.WeakKeyDictionary()


def lockstep_of(group: dist.ProcessGroup, device_type: str) -> Lockstep:
    """The lockstep of all compiled steps whose programs communicate over `group`."""
    found = _of_group.get(group)
    if found is None:
        found = _of_group[group] = Lockstep(group, device_type)
    return found


class Lockstep:
    """The programs that the ranks of one group have run, as all of them know."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self._group = weakref.ref(group)
        # A flag on the CPU needs no synchronization with an accelerator.
        self._device = "cpu" if "cpu" in dist.get_backend_config(group) else device_type
        self._flag = torch.zeros(1, dtype=torch.int32, device=self._device)
        self.expected: Handshake | None = None
        self.last: Handshake | None = None
        self.repeated = 0  # how often it has run without interruption
        self.following: dict[tuple[int, int], Handshake] = {}  # by a program, and how often it has run
        self.known: dict[tuple[tuple[str, ...], ...], Handshake] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None
        return group

    def identify(self, handshake: Handshake | None) -> Handshake | None:
        """The one object for all programs with the same signature, whose collectives therefore match."""
        if handshake is None or self.group.size() == 1:
            return None
        return self.known.setdefault((handshake.signature, handshake.updates), handshake)

    def interrupt(self) -> None:
        """Make ranks that run the expected program stop, and wait until they do."""
        if self.expected is None:
            return
        if self.expected.collectives:
            self.expected.decline()
        else:
            self._reduce_flag(1)

    def look(self) -> None:
        """Look at the flags, for a program whose first collective has no room for them."""
        look_at_sum(self._reduce_flag(0))

    def _reduce_flag(self, value: int) -> torch.Tensor:
        """The sum of all ranks' flags, by the group's own method: dist.all_reduce starts three times as slowly."""
        flag = self._flag.fill_(value)
        self.group.allreduce([flag]).wait()
        return flag

    def change(self, mine: Handshake) -> None:
        """Agree with the other ranks on a program that they may not expect."""
        self.interrupt()
        self._exchange(mine)
        self.expect(mine)

    def expect(self, mine: Handshake) -> None:
        """Note that all ranks will run `mine` next."""
        if self.last is not None:
            self.following[id(self.last), self.repeated] = mine
        self.expected = mine

    def advance(self, mine: Handshake) -> None:
        """Note that all ranks have run `mine`."""
        self.repeated = min(self.repeated + 1, _LONGEST_RUN) if mine is self.last else 1
        self.last = mine
        self.expected = self.following.get((id(mine), self.repeated), mine)

    def stop(self, mine: Handshake) -> None:
        """Raise an error, since another rank has declined the program that this rank runs."""
        self._exchange(mine)
        raise AssertionError("a rank declined the program that all ranks have")

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that this rank has no program for the call."""
        self.interrupt()
        agree(Proposal(error=f"{type(error).__name__}: {error}"), self.group)

    def _exchange(self, mine: Handshake) -> None:
        agree(Proposal(stage="later", facts=mine.facts), self.group)
