"""The sanitizer's checks of a test: which kinds its ranks get, and which they cannot have."""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext._process.declarations import AskedOptions, Level, Option, Setting, either, words
from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import SanitizeKind
    from torch_testing_ext.launch.attempts import RankAttempt
    from torch_testing_ext.launch.jobs import Job


def _read_kinds(text: str) -> frozenset[SanitizeKind]:
    from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import read_kinds

    return read_kinds(text)


def _checked_kinds(text: str) -> str:
    _read_kinds(text)
    return text


def _known_kinds() -> str:
    from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import KNOWN

    return ", ".join(KNOWN)


def _kinds_in_words() -> str:
    return f"kinds of checks, separated by commas: {_known_kinds()}"


KINDS: Setting[frozenset[SanitizeKind]] = Setting(
    "TORCH_TESTING_EXT_SANITIZE", _kinds_in_words, _read_kinds, frozenset()
)
FAILS_FOR_ORDER = Setting("TORCH_TESTING_EXT_SANITIZE_ORDER", "warn or fail", either("warn", "fail"), False)
_CHOSEN = Option(
    "sanitize",
    "diagnosis",
    _checked_kinds,
    "check more closely: default, all, or a list",
    "KINDS",
    kind=str | None,
    setting=KINDS,
    pytest_help="check the collectives of ranks more closely: default, all, or a list such as --sanitize=calls,nan",
    alone="default",
)
_ORDER = Option(
    "sanitize_order",
    "diagnosis",
    words("warn", "fail"),
    "warn or fail if ranks issue collectives of overlapping groups in opposite orders",
    "warn|fail",
    kind=str,
    default="warn",
    setting=FAILS_FOR_ORDER,
    level=Level.SETTING,
)


@functools.cache
def say_if_nothing_is_recorded() -> None:
    """Say once if the collectives of ranks cannot be compared."""
    from torch_testing_ext._torch.groups import flight_recorder
    from torch_testing_ext.launch.user_warnings import show_to_user

    if not flight_recorder.has_flight_recorder():
        text = "torch records no collectives here (TORCH_FR_BUFFER_SIZE=0, or this torch has no flight recorder)"
        left_out = "mismatches are not found, and hangs last until the time-out"
        show_to_user(f"{text}: {left_out}")


@functools.cache
def why_not_sanitized() -> str | None:
    """Return the reason why the ranks of this process cannot be sanitized; None if they can. Says so once."""
    from torch_testing_ext._torch.operations import operation_hook
    from torch_testing_ext.launch.user_warnings import show_to_user

    why = operation_hook.can_hook()
    if why is not None:
        left_out = "roots, reduce operations, splits, messages, buffers and numbers are not checked"
        show_to_user(f"nothing is sanitized: {why}: {left_out}")
    return why


def _say_what_threads_lack(named: frozenset[SanitizeKind]) -> None:
    """Say once which checks are not made of ranks that are threads, unless the header of the run does."""
    from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import not_of_threads
    from torch_testing_ext._tests import notes
    from torch_testing_ext.launch.user_warnings import say_once

    said = KINDS.value() - named if notes.has_header else frozenset()
    note = not_of_threads((KINDS.value() | named) - said)
    if note:
        say_once(note)


# NCCL's backend reads it when a group is made, and then looks for NaN itself, on the device.
_NAN_CHECK_OF_NCCL = {"TORCH_NCCL_NAN_CHECK": "1"}


class Sanitizer(Aspect):
    """Gives the ranks of a test the checks that the test and the settings name."""

    name = "sanitizer"
    gaps = MappingProxyType(
        {
            HostKind.OWN: "such a rank has no log: its exit code says how its test ended",
            HostKind.WORLD: "the rules of whole worlds check the calls of all ranks instead",
        }
    )
    options = (_CHOSEN, _ORDER)

    def header(self, asked: AskedOptions) -> str:
        from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import not_of_threads
        from torch_testing_ext._tests import notes

        kinds = asked.value(_CHOSEN)
        if not kinds:
            return ""
        notes.has_header = True
        return not_of_threads(_read_kinds(kinds))

    def prepare(self, attempt: RankAttempt) -> None:
        from torch_testing_ext.launch.jobs import Sanitize

        named: frozenset[SanitizeKind] = frozenset()
        if attempt.plan.kinds:
            from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import kinds_of

            named = kinds_of(attempt.plan.kinds)
        kinds = KINDS.value() | named
        if attempt.host.kind is HostKind.THREADS:
            _say_what_threads_lack(named)
        else:
            say_if_nothing_is_recorded()
            if kinds and why_not_sanitized() is not None:
                return
        attempt.sanitize = Sanitize(kinds, FAILS_FOR_ORDER.value())

    def complete_job(self, attempt: RankAttempt, job: Job) -> Job:
        kinds = attempt.sanitize.kinds
        if not kinds:
            return job
        from dataclasses import replace

        from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import SanitizeKind

        if SanitizeKind.NAN in kinds:
            job = replace(job, context=replace(job.context, environ={**_NAN_CHECK_OF_NCCL, **job.context.environ}))
        # Only new interpreters differ in hash.
        return replace(job, differs_in_hash=SanitizeKind.HASH in kinds)


SANITIZER = Sanitizer()
