"""Settings from the environment, read at each launch, so that a test may change them.

A misspelt name or value is an error that lists the known ones: a setting that silently has no effect costs an hour.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch_testing_ext._machine.device_locks import LEASED
from torch_testing_ext._machine.sharing import RANKS_PER_GPU, ranks_per_device
from torch_testing_ext._process import user_terminal
from torch_testing_ext._sanitizer.kinds import KNOWN as KNOWN_KINDS, SanitizeKind, kinds_of, read_kinds

from .job import Job, Sanitize

PREFIX = "TORCH_TESTING_EXT_"
# Options of run_test.py, which reads and checks them itself.
RUNNER_PREFIX = PREFIX + "RUN_"


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

    def for_ranks(self, kinds: Iterable[str] = ()) -> Sanitize:
        """Choose the checks for ranks whose test names these kinds, besides those of the settings."""
        return Sanitize(self.sanitize | kinds_of(kinds), self.fails_for_order, self.shake)


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
    PREFIX + "START": _Setting("start", "auto, fork, fork-fresh or spawn", _one_of(*_STARTS)),
    PREFIX + "LOGS": _Setting("logs", "a directory", _directory),
    PREFIX + "STREAM": _Setting("stream", "0 or 1", _either("0", "1")),
    PREFIX + "LANES": _Setting("lanes", "0 or 1", _either("0", "1")),
    PREFIX + "DEBUG_RANK": _Setting("debug_rank", "a rank: 0, 1, 2 ...", _number),
    PREFIX + "SANITIZE": _Setting(
        "sanitize", f"kinds of checks, separated by commas: {', '.join(KNOWN_KINDS)}", read_kinds
    ),
    PREFIX + "SANITIZE_ORDER": _Setting("fails_for_order", "warn or fail", _either("warn", "fail")),
    PREFIX + "SHAKE": _Setting("shake", "a seed: 0, 1, 2 ...", _number),
    # Set by run_test.py --fake-gpus: the devices that the test would have if they existed.
    PREFIX + "FAKE_DEVICES": _Setting("fake_devices", "numbers: 0,3", _names),
}
# Those that other modules read.
_OF_WARM_SERVERS = (PREFIX + "WARM", PREFIX + "WARM_IDLE")
KNOWN_NAMES = (*KNOWN_SETTINGS, RANKS_PER_GPU, LEASED, user_terminal.SETTING, *_OF_WARM_SERVERS)


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in force. An empty value counts as not set. Raises ValueError for an unknown name or value."""
    environ = os.environ if environ is None else environ
    chosen = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name.startswith(RUNNER_PREFIX) or not text:
            continue
        if name not in KNOWN_NAMES:
            raise ValueError(f"{name} is not a known setting; known are: {', '.join(KNOWN_NAMES)}")
        if name not in KNOWN_SETTINGS:
            continue
        setting = KNOWN_SETTINGS[name]
        try:
            chosen[setting.field] = setting.parse(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} is not understood; known values: {setting.values}") from None
    ranks_per_device(environ)
    return Settings(**chosen)


# NCCL's backend reads it when a group is made, and then looks for NaN itself, on the device.
_NAN_CHECK_OF_NCCL = {"TORCH_NCCL_NAN_CHECK": "1"}


def complete(job: Job) -> Job:
    """The job with what the settings say of the sanitizer, unless it says that itself."""
    chosen = read().for_ranks() if job.sanitize is None else job.sanitize
    differs = job.differs_in_hash or SanitizeKind.HASH in chosen.kinds
    if SanitizeKind.NAN in chosen.kinds:
        job = replace(job, context=replace(job.context, environ={**_NAN_CHECK_OF_NCCL, **job.context.environ}))
    return replace(job, sanitize=chosen, differs_in_hash=differs)


def wanted_start(job: Job) -> str:
    """Return the start method that the setting wants for a complete job: only new interpreters differ in hash."""
    return "spawn" if job.differs_in_hash else read().start


# More would have some 200 GB of torch, and half a million connections of one group.
MOST_RANKS = 1024


def too_many(world_size: int) -> str:
    """Why there cannot be so many ranks; "" if there can."""
    if world_size <= MOST_RANKS:
        return ""
    return (
        f"at most {MOST_RANKS} are possible: every rank is a process of this machine that has imported torch and is "
        f"connected with all others"
    )
