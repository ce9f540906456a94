"""The checks that the ranks of a test get: collectives are compared, tensors and work are sanitized."""

import functools
from collections.abc import Iterable

from torch_testing_ext import _torch
from torch_testing_ext._sanitizer.kinds import SanitizeKind
from torch_testing_ext.launch import settings
from torch_testing_ext.launch.job import Sanitize

from .verdicts import say, say_once

# They share the hash seed of their interpreter, and torch's hooks of optimizers.
_NOT_OF_THREADS = (SanitizeKind.HASH, SanitizeKind.REPLICAS)


@functools.cache
def say_if_nothing_is_recorded() -> None:
    """Say once if the collectives of ranks cannot be compared."""
    if not _torch.flight_recorder.has_flight_recorder():
        text = "torch records no collectives here (TORCH_FR_BUFFER_SIZE=0, or this torch has no flight recorder)"
        left_out = "mismatches are not found, and hangs last until the time-out"
        say(f"{text}: {left_out}")


@functools.cache
def why_not_sanitized() -> str | None:
    """Return the reason why the ranks of this process cannot be sanitized; None if they can. Says so once."""
    from torch_testing_ext._torch import hook

    why = hook.can_hook()
    if why is not None:
        left_out = "roots, reduce operations, splits, messages, buffers and numbers are not checked"
        say(f"nothing is sanitized: {why}: {left_out}")
    return why


def sanitize_with(kinds: Iterable[str]) -> Sanitize:
    """Choose the sanitizer's checks for the ranks of a test that names these kinds; none if there can be none.

    Says once if their collectives cannot be compared.
    """
    say_if_nothing_is_recorded()
    chosen = settings.read().for_ranks(kinds)
    return Sanitize() if chosen and why_not_sanitized() is not None else chosen


def sanitize_threads(kinds: Iterable[str]) -> Sanitize:
    """Choose the sanitizer's checks for ranks that are threads. Says once which are left out."""
    chosen = settings.read().for_ranks(kinds)
    missing = [kind.value for kind in _NOT_OF_THREADS if kind in chosen.kinds]
    if missing:
        say_once(f"ranks that are threads are not checked for: {', '.join(missing)}")
    return chosen
