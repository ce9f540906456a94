"""Variables: the user's settings, those by which launchers place a process, those that ranks get."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import (
    KNOWN as KNOWN_KINDS,
    SanitizeKind,
    kinds_of,
    read_kinds,
)
from torch_testing_ext._machine import fake_accelerator
from torch_testing_ext._machine.device_rules import RANKS_PER_GPU, ranks_per_device
from torch_testing_ext._machine.ports import leased_port
from torch_testing_ext._process import (
    launcher_variables,
    launcher_variables as variables,
    messages,
    notes,
    project_settings,
    setting_names,
    system,
)
from torch_testing_ext._process.setting_names import DEFAULT_TIMEOUT, PREFIX
from torch_testing_ext._process.words import nearest
from torch_testing_ext.faults import Sweep
from torch_testing_ext.launch.jobs import Job, Sanitize

# --------------------------------------------------------------------------------------------------------------------
# The place of this process among the ranks that a launcher has started: torchrun, mpirun, srun or another.

# Of each job that runs at the same time on a machine, "host:port".
ADDRESS = "NCCL_RAS_ADDR"


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
        """Has a process with these variables and this parent been started as another rank of this launch?"""
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
        known = [str(system.starter(parent, variables.PROGRAMS) if variables.has_program(environ) else parent)]
    text = json.dumps([os.getuid(), *known])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# --------------------------------------------------------------------------------------------------------------------
# The variables by which frameworks find their ranks, as a launcher such as torchrun sets them.

# What this process was started with. A test that needs another port sets it before its ranks start.
_INHERITED_PORT = os.environ.get("MASTER_PORT")


@contextmanager
def leased_variables(world_size: int, keep: bool = False) -> Iterator[dict[str, str]]:
    """Yield the variables common to all ranks of a test. Their ports belong to nobody else while the `with` lasts.

    `keep`: leave a MASTER_PORT that the test has set before its ranks start.
    """
    with leased_port() as port:
        environ = common_variables(world_size, port)
        chosen = os.environ.get("MASTER_PORT")
        if keep and chosen is not None and chosen != _INHERITED_PORT:
            environ["MASTER_PORT"] = chosen
            environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if ADDRESS in os.environ:
            yield environ
            return
        with leased_port() as ras:
            yield {**environ, ADDRESS: f"localhost:{ras}"}


def common_variables(world_size: int, port: int) -> dict[str, str]:
    """Return the variables common to all ranks. `port`: where rank 0 may listen."""
    size = str(world_size)
    _check_network()
    own = {**dict.fromkeys(launcher_variables.OF_ALL_RANKS, size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Otherwise `env://` would look for the store of a launcher that has started this process.
    return {**system.for_gloo(), **own, **launcher_variables.own_store(os.environ)}


@functools.cache
def _check_network() -> None:
    """Warn, once, if ranks will not be able to connect: the errors that they will raise do not say why."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # It sends nothing.
            probe.connect(("127.0.0.1", 9))
        except OSError as error:
            notes.warn_user(
                f"ranks will not be able to connect, as nothing on this machine reaches 127.0.0.1 ({error.strerror}). "
                f"{system.NO_LOOPBACK}"
            )


def set_variables_of_rank(rank: int, incarnation: int = 0) -> None:
    """Set the variables of this rank alone."""
    if incarnation:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(incarnation)
    os.environ.update(dict.fromkeys(launcher_variables.OF_ONE_RANK, str(rank)))
    os.environ[SET_BY_US] = f"{rank}:{os.environ.get('MASTER_PORT', '')}"


# --------------------------------------------------------------------------------------------------------------------
# Settings from the environment, read at each launch, so that a test may change them.
#
# A misspelt name or value is an error that lists the known ones: a setting that silently has no effect costs an hour.

# Options of the runner, which reads and checks them itself.
RUNNER_PREFIX = project_settings.RUNNER_PREFIX


@dataclass(frozen=True)
class Settings:
    """The settings of one launch."""

    start: str = "auto"
    logs: Path | None = None
    stream: bool = False
    lanes: bool = False
    debug_rank: int | None = None
    fake_devices: tuple[str, ...] = ()
    sanitize: frozenset[SanitizeKind] = frozenset()
    fails_for_order: bool = False
    shake: int | None = None
    world: int | None = None
    sweep: Sweep | None = None

    def for_ranks(self, kinds: Collection[str] = ()) -> Sanitize:
        """Choose the checks for ranks whose test names these kinds, besides those of the settings."""
        chosen = self.sanitize | kinds_of(kinds) if kinds else self.sanitize
        return Sanitize(chosen, self.fails_for_order, self.shake)


class _Setting(NamedTuple):
    field: str
    values: str
    parse: Callable[[str], Any]


def _either(false: str, true: str) -> Callable[[str], bool]:
    """Read a value that is one of two words."""
    read_word = _one_of(false, true)
    return lambda text: read_word(text) == true


def _one_of(*words: str) -> Callable[[str], str]:
    """Read a value that is one of these words."""

    def read_word(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return read_word


def _directory(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


_STARTS = ("auto", "fork", "fork-fresh", "spawn")
KNOWN_SETTINGS = {
    setting_names.START: _Setting("start", "auto, fork, fork-fresh or spawn", _one_of(*_STARTS)),
    setting_names.LOGS: _Setting("logs", "a directory", _directory),
    setting_names.STREAM: _Setting("stream", "0 or 1", _either("0", "1")),
    setting_names.DEBUG_RANK: _Setting("debug_rank", "a rank: 0, 1, 2 ...", _number),
    setting_names.SANITIZE: _Setting(
        "sanitize", f"kinds of checks, separated by commas: {', '.join(KNOWN_KINDS)}", read_kinds
    ),
    setting_names.SANITIZE_ORDER: _Setting("fails_for_order", "warn or fail", _either("warn", "fail")),
    setting_names.SHAKE: _Setting("shake", "a seed: 0, 1, 2 ...", _number),
    setting_names.FAKE_DEVICES: _Setting("fake_devices", "numbers: 0,3", _names),
}
_OWN_SETTINGS = {
    setting_names.LANES: _Setting("lanes", "0 or 1", _either("0", "1")),
    setting_names.WORLD: _Setting("world", "a number of ranks", _number),
    setting_names.SWEEP: _Setting("sweep", "a sweep", lambda text: messages.decode(Sweep, json.loads(text))),
}
# Those that other modules read.
KNOWN_NAMES = (*KNOWN_SETTINGS, RANKS_PER_GPU, *fake_accelerator.SETTINGS)


def _check_default_timeout(text: str) -> None:
    with suppress(ValueError):
        if not text or float(text) > 0:
            return
    raise ValueError(f"{DEFAULT_TIMEOUT}={text!r} is not valid; use seconds, such as 300")


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in force. An empty value counts as not set. Raises ValueError for an unknown name or value."""
    environ = os.environ if environ is None else environ
    chosen = {}
    for name, text in environ.items():
        if name.startswith(PREFIX) and not name.startswith(RUNNER_PREFIX) and text and name not in KNOWN_NAMES:
            raise ValueError(f"{name} is not a variable of torch_testing_ext.{nearest(name, KNOWN_NAMES)}")
        setting = KNOWN_SETTINGS.get(name) or _OWN_SETTINGS.get(name)
        if setting is None or not text:
            continue
        try:
            chosen[setting.field] = setting.parse(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} is not valid; use {setting.values}") from None
    if RANKS_PER_GPU in environ:
        # Raises an error unless it is a number.
        ranks_per_device(environ)
    _check_default_timeout(environ.get(DEFAULT_TIMEOUT, ""))
    return Settings(**chosen)


# NCCL's backend reads it when a group is made, and then looks for NaN itself, on the device.
_NAN_CHECK_OF_NCCL = {"TORCH_NCCL_NAN_CHECK": "1"}


def complete_job(job: Job) -> Job:
    """The job with what the settings say of the sanitizer, unless it says that itself."""
    chosen = read_settings().for_ranks() if job.sanitize is None else job.sanitize
    differs = job.differs_in_hash or SanitizeKind.HASH in chosen.kinds
    if SanitizeKind.NAN in chosen.kinds:
        job = replace(job, context=replace(job.context, environ={**_NAN_CHECK_OF_NCCL, **job.context.environ}))
    return replace(job, sanitize=chosen, differs_in_hash=differs)


def wanted_start(job: Job) -> str:
    """Return the start method that the setting wants for a complete job: only new interpreters differ in hash."""
    return "spawn" if job.differs_in_hash else read_settings().start


# More would have some 200 GB of torch, and half a million connections of one group.
MOST_RANKS = 1024


def too_many(world_size: int) -> str:
    """Why there cannot be so many ranks; "" if there can."""
    if world_size <= MOST_RANKS:
        return ""
    return (
        f"at most {MOST_RANKS} are possible: each rank is a process on this machine that imports torch and "
        f"connects to all others"
    )
