"""The sanitizer's checks of a test: which kinds its ranks get, and which they cannot have."""

from __future__ import annotations

import functools
from collections.abc import Collection
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import kinds_of, not_of_threads
from torch_testing_ext._tests import notes
from torch_testing_ext.launch import launch_settings
from torch_testing_ext.launch.attempts import Aspect, HostKind
from torch_testing_ext.launch.jobs import Sanitize
from torch_testing_ext.launch.user_warnings import say_once, show_to_user

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt


@functools.cache
def say_if_nothing_is_recorded() -> None:
    """Say once if the collectives of ranks cannot be compared."""
    from torch_testing_ext._torch.groups import flight_recorder

    if not flight_recorder.has_flight_recorder():
        text = "torch records no collectives here (TORCH_FR_BUFFER_SIZE=0, or this torch has no flight recorder)"
        left_out = "mismatches are not found, and hangs last until the time-out"
        show_to_user(f"{text}: {left_out}")


@functools.cache
def why_not_sanitized() -> str | None:
    """Return the reason why the ranks of this process cannot be sanitized; None if they can. Says so once."""
    from torch_testing_ext._torch.operations import operation_hook

    why = operation_hook.can_hook()
    if why is not None:
        left_out = "roots, reduce operations, splits, messages, buffers and numbers are not checked"
        show_to_user(f"nothing is sanitized: {why}: {left_out}")
    return why


def sanitize_with(kinds: Collection[str]) -> Sanitize:
    """Choose the sanitizer's checks for the ranks of a test that names these kinds; none if there can be none.

    Says once if their collectives cannot be compared.
    """
    say_if_nothing_is_recorded()
    chosen = launch_settings.read_settings().for_ranks(kinds)
    return Sanitize() if chosen and why_not_sanitized() is not None else chosen


def sanitize_threads(kinds: Collection[str]) -> Sanitize:
    """Choose the sanitizer's checks for ranks that are threads. Says once which are left out, unless a header does."""
    settings = launch_settings.read_settings()
    named = kinds_of(kinds)
    said = settings.sanitize - named if notes.has_header else frozenset()
    note = not_of_threads((settings.sanitize | named) - said)
    if note:
        say_once(note)
    return settings.for_ranks(kinds)


class Sanitizer(Aspect):
    """Gives the ranks of a test the checks that the test and the settings name."""

    name = "sanitizer"

    gaps = MappingProxyType(
        {
            HostKind.OWN: "such a rank has no log: its exit code says how its test ended",
            HostKind.WORLD: "the rules of whole worlds check the calls of all ranks instead",
        }
    )

    def prepare(self, attempt: RankAttempt) -> None:
        kinds = attempt.plan.kinds
        attempt.sanitize = sanitize_threads(kinds) if attempt.host.kind is HostKind.THREADS else sanitize_with(kinds)


SANITIZER = Sanitizer()
