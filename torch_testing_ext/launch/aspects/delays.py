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


def _read_shake(text: str) -> str:
    """Read a number of runs, and the seed of the first of them: `20` or `20:7`."""
    runs, colon, seed = text.partition(":")
    if not runs.isdecimal() or int(runs) < 1 or (colon and not seed.isdecimal()):
        raise ValueError(f"{text!r} is not a number of runs such as 20, or runs and a seed such as 20:7")
    return text


SEED: Setting[int | None] = Setting("TORCH_TESTING_EXT_SHAKE", "a seed: 0, 1, 2 ...", number, None)
_SHAKE = Option(
    "shake",
    "sanitizer",
    _read_shake,
    "run every test N times, with random delays",
    "N[:SEED]",
    kind=str | None,
    apart={"repeat": "--shake repeats tests by itself. Leave out --repeat"},
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
    options = (_SHAKE,)
    settings = (SEED,)

    def implied(self, asked: AskedOptions) -> Mapping[str, Any]:
        shake = asked.value(_SHAKE)
        if shake is None or ":" in shake:
            return {}
        import random

        return {_SHAKE.field: f"{shake}:{random.randrange(2**31)}"}

    def variables(self, asked: AskedOptions, repetition: int = 0, command: str = "") -> Mapping[str, str]:
        seed = _seed(asked, repetition)
        return {} if seed is None else {SEED.name: str(seed)}

    def repetitions(self, asked: AskedOptions) -> int | None:
        shake = asked.value(_SHAKE)
        return None if shake is None else int(shake.partition(":")[0])

    def words_again(self, asked: AskedOptions, repetition: int) -> str:
        seed = _seed(asked, repetition)
        return "" if seed is None else f"{_SHAKE.flag}=1:{seed}"

    def prepare(self, attempt: RankAttempt) -> None:
        seed = SEED.value()
        if seed is None:
            return
        from dataclasses import replace

        from torch_testing_ext.launch.aspects.sanitizer import why_not_sanitized

        if attempt.host.kind is HostKind.THREADS or why_not_sanitized() is None:
            attempt.sanitize = replace(attempt.sanitize, shake=seed)


def _seed(asked: AskedOptions, repetition: int) -> int | None:
    """The seed of a repetition; None without delays, and before a run has chosen one."""
    _, colon, seed = (asked.value(_SHAKE) or "").partition(":")
    return int(seed) + repetition if colon else None


DELAYS = RandomDelays()
