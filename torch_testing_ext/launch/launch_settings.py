"""Settings from the environment, read at each launch, so that a test may change them.

A misspelt name or value is an error that lists the known ones: a setting that silently has no effect costs an hour.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import (
    KNOWN as KNOWN_KINDS,
    SanitizeKind,
    kinds_of,
    read_kinds,
)
from torch_testing_ext._machine import fake_accelerator
from torch_testing_ext._machine.device_sharing import RANKS_PER_GPU, ranks_per_device
from torch_testing_ext._process import messages, setting_names
from torch_testing_ext._process.project_settings import RUNNER_PREFIX
from torch_testing_ext._process.setting_names import DEFAULT_TIMEOUT, PREFIX
from torch_testing_ext._process.words import nearest
from torch_testing_ext.faults import Sweep
from torch_testing_ext.launch.jobs import Job, Sanitize


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


# A log has room for a few groups of so many members, and each rank takes some milliseconds.
MOST_RANKS_OF_WORLD = 16_384


def too_many_in_world(size: int) -> str:
    """Why a whole world cannot have so many ranks; "" if it can."""
    return "" if size <= MOST_RANKS_OF_WORLD else f"a whole world has at most {MOST_RANKS_OF_WORLD:,} ranks"


def too_many(world_size: int) -> str:
    """Why there cannot be so many ranks; "" if there can."""
    if world_size <= MOST_RANKS:
        return ""
    return (
        f"at most {MOST_RANKS} are possible: each rank is a process on this machine that imports torch and "
        f"connects to all others"
    )
