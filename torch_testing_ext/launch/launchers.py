"""The place of this process among the ranks that a launcher has started: torchrun, mpirun, srun or another."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from torch_testing_ext._process import launcher_variables as variables

# In the ranks that we start, and in their children: the values of RANK and MASTER_PORT that are ours.
SET_BY_US = "_TORCH_TESTING_EXT_RANK"


@dataclass(frozen=True)
class Launched:
    """The description of this process by its launcher."""

    rank: int
    world_size: int
    is_one_machine: bool
    local_rank: int
    key: str  # the same in all ranks of this launch, and in no others of this machine
    terminal: int = 2  # the descriptor of what was stderr at the start of this process

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Launched | None:
        # A process that one of our ranks has started is no rank. A launcher in it sets variables of its own.
        torchrun = variables.TORCHRUN
        if environ.get(SET_BY_US) == f"{environ.get(torchrun.rank)}:{environ.get(variables.PORT, '')}":
            return None
        for launcher in variables.LAUNCHERS:
            numbers = [environ.get(name, "") for name in (launcher.rank, launcher.world_size)]
            # One process, as in an interactive step of Slurm, can start ranks of its own.
            if all(number.isdecimal() for number in numbers) and int(numbers[0]) < int(numbers[1]) > 1:
                is_one_machine = environ.get(launcher.local_world_size, numbers[1]) == numbers[1]
                if launcher.nodes:
                    is_one_machine = environ.get(launcher.nodes, "1") == "1"
                local_rank = environ.get(torchrun.local_rank) or environ.get(launcher.local_rank) or numbers[0]
                return cls(int(numbers[0]), int(numbers[1]), is_one_machine, int(local_rank), _key(environ))
        return None

    @property
    def address(self) -> str:
        """The Unix socket at which the ranks of this launch meet."""
        return f"\0torch_testing_ext-{self.key}"

    def say(self, text: str) -> None:
        """Write to the terminal, whatever captures the output of tests."""
        with suppress(OSError):
            os.write(self.terminal, f"\n{text}\n".encode(errors="replace"))

    def abandon(self, why: str) -> NoReturn:
        """End this process at once: its main thread is in a test that does not return."""
        if why:
            self.say(why)
        os._exit(1)


@functools.cache
def this_launch() -> Launched | None:
    """Describe this process as its launcher does; None if no launcher has started it.

    The first call keeps the answer and a way to the terminal. It has to come before tests change the variables, and
    before pytest captures the descriptor 2: pytest's plugin and the modules of the test classes make it when they are
    imported.
    """
    found = Launched.read(os.environ)
    return found and replace(found, terminal=os.dup(found.terminal))


def _key(environ: Mapping[str, str]) -> str:
    """Derive the key from the launcher's rendezvous; without one, from the process that has started all ranks."""
    has_rendezvous = bool(environ.get(variables.PORT))
    known = [environ.get(name, "") for name in variables.OF_ONE_LAUNCH] if has_rendezvous else [str(os.getppid())]
    text = json.dumps([os.getuid(), *known])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
