"""The collectives of a rank: at the end of each test for its account, and in a file when the parent asks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch_testing_ext._collectives.blocked.rank_state import RankState
from torch_testing_ext._collectives.records.raw_records import pack_record
from torch_testing_ext._process import messages, system
from torch_testing_ext.launch import account_writer, exceptions_in_flight
from torch_testing_ext.launch.account_writer import account_of
from torch_testing_ext.launch.accounts import now
from torch_testing_ext.launch.jobs import Sanitize
from torch_testing_ext.launch.rank_context import context_here


def begin_first_task() -> None:
    """In a persistent rank: its first test begins, in which earlier collectives do not count."""
    if _has_made_groups():
        from torch_testing_ext._torch.groups import flight_recorder

        flight_recorder.forget_collectives()


def prepare_to_sanitize(sanitize: Sanitize | None) -> None:
    """In a process that forks ranks: let them inherit the hook, or remove it."""
    wanted = sanitize is not None and (bool(sanitize) or sanitize.is_recorded)
    if wanted or "torch_testing_ext._collectives.sanitizer.rank_sanitizer" in sys.modules:
        from torch_testing_ext._collectives.sanitizer import rank_sanitizer

        rank_sanitizer.of_process.prepare(wanted)


def begin_sanitizing(rank: int, wanted: Sanitize | None, log: Path) -> None:
    """A test begins in this rank."""
    prepare_to_sanitize(wanted)
    if wanted:
        from torch_testing_ext._collectives.sanitizer import rank_sanitizer

        rank_sanitizer.of_process.begin(rank, wanted.kinds, wanted.delays, log, wanted.faults, _wait_for_peers)


def _wait_for_peers() -> None:
    """Before a fault: wait until no peer is creating a group that this rank has created, or its creation would fail."""
    context = context_here()
    if context is not None and context.group_creation is not None:
        context.group_creation.wait_for_peers()


def end_of_sanitizing() -> None:
    """The test of this rank has returned. Raises what the sanitizer has failed with."""
    sanitizer = sys.modules.get("torch_testing_ext._collectives.sanitizer.rank_sanitizer")
    if sanitizer is not None:
        sanitizer.of_process.finish()


def collectives_of_test(more_follow: bool = False) -> bytes:
    """At the end of a test: the collectives of this rank; b"" if it has made no process group."""
    is_forked_by_test = context_here() is None
    if is_forked_by_test or not _has_made_groups():
        return b""
    from torch_testing_ext._torch.groups import collective_errors, flight_recorder

    sequences = _sequences()
    dumps = flight_recorder.take_collectives() if more_follow else flight_recorder.recorded_collectives()
    packed = _packed(dumps, now(), sequences=sequences)
    if more_follow:
        collective_errors.errors.forget()
    return packed


def write_answer(target: Path, with_state: bool) -> None:
    """While the test runs: write the collectives that this rank has issued so far, and what its threads do."""
    from torch_testing_ext._collectives.blocked.process_threads import state_of_process
    from torch_testing_ext._torch.groups import flight_recorder

    at = now()
    state = state_of_process() if with_state else None
    sanitizer = sys.modules.get("torch_testing_ext._collectives.sanitizer.rank_sanitizer")
    if state is not None and sanitizer is not None and sanitizer.of_process.is_active:
        # The parent reads the log; the first dump of a recorder takes half a second.
        state = replace(state, timers=state.timers or sanitizer.of_process.has_shorter_timeouts())
        data = _packed([], at, state, {})
    else:
        # Before the dump: a later one would look like a gap.
        sequences = _sequences()
        dumps = flight_recorder.recorded_collectives()
        data = _packed(dumps, at, state, sequences)
    _put(target, data)


def answer_error(target: Path) -> None:
    """While the test runs: write an account of the exception that is in flight in the main thread, if there is one.

    Where no thread can be started, gloo hangs, or aborts without a word: then that is told.
    """
    error = exceptions_in_flight.of_main_thread()
    if error is None and not system.may_start_thread():
        error = RuntimeError(account_writer.NO_THREAD)
    if error is not None:
        account = account_of(error, isinstance(error, AssertionError), now())
        _put(target, messages.to_json(account).encode("ascii"))


def _put(target: Path, data: bytes) -> None:
    # The parent may read at any time.
    unfinished = target.with_name(f"{target.name}.new")
    unfinished.write_bytes(data)
    os.replace(unfinished, target)


def _has_made_groups() -> bool:
    """Whether this process has made a process group."""
    log = sys.modules.get("torch_testing_ext._torch.groups.made_groups")
    return log is not None and bool(log.made_groups())


def _packed(
    dumps: list[tuple[int, bytes]],
    at: float,
    state: RankState | None = None,
    sequences: dict[str, tuple[int, int, int]] | None = None,
) -> bytes:
    from torch_testing_ext._torch import torch_frames
    from torch_testing_ext._torch.groups import collective_errors, made_groups
    from torch_testing_ext.launch.aspects import warnings_in_rank

    groups = [group.fields for group in made_groups.made_groups()]
    creating = made_groups.group_in_creation()
    being_made = None if creating is None else creating.fields
    errors = list(collective_errors.errors.moments)
    lists = [tuple(each) for each in made_groups.noted_lists]
    living = None if state is None else made_groups.living_groups()
    folder, dead = torch_frames.TORCH_FOLDER, list(warnings_in_rank.dead_threads)
    return pack_record(groups, dumps, errors, folder, at, state, sequences, being_made, lists, living, dead)


def _sequences() -> dict[str, tuple[int, int, int]] | None:
    from torch_testing_ext._torch.groups import flight_recorder

    # A backend may have none.
    with suppress(Exception):
        return flight_recorder.sequence_numbers()
    return None
