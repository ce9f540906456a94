"""The place of this process among the ranks that a launcher has started: torchrun, mpirun, srun or another."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from torch_testing_ext._process import system
from torch_testing_ext._tests import launcher_variables as variables
from torch_testing_ext._torch.signs.native_threads import TORCHRUN

# In the ranks that we start, and in their children: the values of RANK and MASTER_PORT that are ours.
SET_BY_US = "_TORCH_TESTING_EXT_RANK"
# Sockets by which this process is seen as a rank.
_signs: list[socket.socket] = []


def withdraw() -> None:
    """Be seen as a rank no more."""
    while _signs:
        _signs.pop().close()


# What this process forks may live longer.
os.register_at_fork(after_in_child=withdraw)


@dataclass(frozen=True)
class Launched:
    """The description of this process by its launcher."""

    rank: int
    world_size: int
    is_one_machine: bool
    local_rank: int
    key: str  # the same in all ranks of this launch, and in no others of this machine
    terminal: int = 2  # the descriptor of what was stderr at the start of this process
    # Where the store of ranks on several machines listens, and whether the launcher has made it; rank 0 does otherwise.
    store_host: str = ""
    store_port: str = ""
    has_store: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str], parent: int | None = None) -> Launched | None:
        """Read the variables of a process, this one or another with this parent; None if no launcher has set them."""
        # A process that one of our ranks has started is no rank. A launcher in it sets variables of its own.
        torchrun = variables.TORCHRUN
        if environ.get(SET_BY_US) == f"{environ.get(torchrun.rank)}:{environ.get(variables.PORT, '')}":
            return None
        for launcher in variables.LAUNCHERS:
            numbers = [environ.get(name, "") for name in (launcher.rank, launcher.world_size)]
            # One process, as in an interactive step of Slurm, can start ranks of its own.
            if all(number.isdecimal() for number in numbers) and int(numbers[0]) < int(numbers[1]) > 1:
                is_one_machine = variables.is_one_machine(environ, launcher)
                local_ranks = [environ.get(name, "") for name in (torchrun.local_rank, launcher.local_rank)]
                local_rank = next(filter(str.isdecimal, local_ranks), numbers[0])
                return cls(
                    int(numbers[0]),
                    int(numbers[1]),
                    is_one_machine,
                    int(local_rank),
                    _key(environ, parent),
                    store_host=environ.get(variables.ADDRESS, ""),
                    store_port=environ.get(variables.PORT, ""),
                    has_store=environ.get(variables.AGENT_STORE) == "True",
                )
        return None

    @property
    def address(self) -> str:
        """The Unix socket at which the ranks of this launch meet."""
        return f"\0torch_testing_ext-{self.key}"

    def sign_of(self, rank: int) -> str:
        """The Unix socket by which a rank of this launch is seen on its machine."""
        return f"{self.address}-{rank}"

    def announce(self) -> None:
        """Show the other ranks on this machine, for as long as this process lives, that it is one of them."""
        # A socket without a system that knows such names, or of a second program in the same shell.
        with suppress(OSError):
            sign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            _signs.append(sign)
            sign.bind(self.sign_of(self.rank))

    def is_with(self, environ: Mapping[str, str], parent: int) -> bool:
        """Whether a process with these variables and this parent was started as another rank of this launch."""
        other = Launched.read(environ, parent)
        if other is None or other.rank == self.rank:
            return False
        # Both may set a port of their own before they import this package: that is not seen from outside.
        own_key = self.key if environ.get(variables.PORT) else _key(environ, None)
        return (other.key, other.world_size) == (own_key, self.world_size)

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
    launched = Launched.read(os.environ)
    if launched is None:
        return None
    launched.announce()
    return replace(launched, terminal=os.dup(launched.terminal))


def _key(environ: Mapping[str, str], parent: int | None) -> str:
    """Derive the key from the launcher's rendezvous; without one, from the process that has started all ranks."""
    if environ.get(variables.PORT):
        known = [environ.get(name, "") for name in variables.OF_ONE_LAUNCH]
    else:
        parent = os.getppid() if parent is None else parent
        # A shell in between would be another one for each rank.
        names = (*variables.PROGRAMS, *TORCHRUN)
        known = [str(system.starter(parent, names) if variables.has_program(environ) else parent)]
    text = json.dumps([os.getuid(), *known])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
