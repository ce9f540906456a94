"""Delays: collectives of ranks that start late at random, repeatable by a seed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch_testing_ext._process.declarations import AskedOptions, Option, Setting, number
from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt


def _read_seed(text: str) -> str:
    """Read a seed; `random` has the run choose one."""
    if text != RANDOM and not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is not a seed: {SEEDS}")
    return text


RANDOM = "random"
SEEDS = "0, 1, 2 ..."
SEED: Setting[int | None] = Setting("TORCH_TESTING_EXT_DELAYS", f"a seed: {SEEDS}", number, None)
_DELAYS = Option(
    "delays",
    "diagnosis",
    _read_seed,
    "delay collectives at random, to find races",
    "SEED",
    kind=str | None,
    alone=RANDOM,
    # Each repetition has a seed of its own.
    in_command=False,
)


class RandomDelays(Aspect):
    """Delays the collectives of ranks."""

    name = "delays"
    is_always_on = False
    gaps = MappingProxyType(
        {
            HostKind.OWN: "such a rank has no log: its exit code says how its test ended",
            HostKind.WORLD: "its ranks wait for nobody, so delays change nothing",
        }
    )
    options = (_DELAYS,)
    settings = (SEED,)

    def implied(self, asked: AskedOptions) -> Mapping[str, Any]:
        if asked.value(_DELAYS) != RANDOM:
            return {}
        import random

        return {_DELAYS.field: str(random.randrange(2**31))}

    def variables(self, asked: AskedOptions, repetition: int = 0, command: str = "") -> Mapping[str, str]:
        seed = _seed(asked, repetition)
        return {} if seed is None else {SEED.name: str(seed)}

    def words_again(self, asked: AskedOptions, repetition: int) -> str:
        seed = _seed(asked, repetition)
        return "" if seed is None else f"{_DELAYS.flag}={seed}"

    def prepare(self, attempt: RankAttempt) -> None:
        seed = SEED.value()
        if seed is None:
            return
        from dataclasses import replace

        from torch_testing_ext.launch.aspects.sanitizer import why_not_sanitized

        if attempt.host.kind is HostKind.THREADS or why_not_sanitized() is None:
            attempt.sanitize = replace(attempt.sanitize, delays=seed)


def _seed(asked: AskedOptions, repetition: int) -> int | None:
    """The seed of a repetition; None without delays, and before a run has chosen one."""
    seed = asked.value(_DELAYS)
    return None if seed is None or seed == RANDOM else int(seed) + repetition


DELAYS = RandomDelays()
