"""Test cases in processes that a launcher has started: they run in place, and get the verdict on all ranks."""

from __future__ import annotations

import functools
import gc
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_testing_ext import launch
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import SanitizeKind
from torch_testing_ext._testing.bases import group_creation, rank_accounts, rank_life
from torch_testing_ext._testing.bases.rank_verdicts import rank_error
from torch_testing_ext._testing.helpers.contexts import changed_environment
from torch_testing_ext._testing.marks.needs import TEST_SKIPS, Skipped, TestSkip
from torch_testing_ext._tests.launcher_variables import ADDRESS, PORT, TORCHRUN, own_store
from torch_testing_ext.launch import this_launch
from torch_testing_ext.launch.aspects import rank_warnings, warnings_in_rank
from torch_testing_ext.launch.attempts import Host, RankAttempt, RanksEnd
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.jobs import Sanitize, log_of
from torch_testing_ext.launch.user_warnings import show_to_user

if TYPE_CHECKING:
    from torch_testing_ext.launch.launched.member import Member
    from torch_testing_ext.launch.launched.round_messages import Round, RoundJudged


__unittest = True

# Read the variables before a test changes them.
this_launch()


def size() -> int:
    """The number of ranks that the launcher has started."""
    launched = this_launch()
    assert launched is not None
    return launched.world_size


def is_first() -> bool:
    """Whether this process is rank 0, which reports for all."""
    launched = this_launch()
    return launched is not None and launched.rank == 0


def judged() -> RoundJudged:
    """Return the verdict on the latest test of this process, and the accounts of its ranks."""
    judged = _member().of_this_process().judged
    assert judged is not None
    return judged


def _member() -> type[Member]:
    from torch_testing_ext.launch.launched.member import Member

    return Member


def check_launch(test: unittest.TestCase | None = None) -> None:
    """Raise an error if this process has the variables of a rank, but no other rank is there."""
    why = launch.why_no_rank()
    if why:
        raise rank_error(launch.Verdict(launch.TestOutcome.ERROR, why), test)


def wrong_size(world_size: int) -> str:
    """Say why a test does not run in this launch; "" if it does, or if there is none."""
    if this_launch() is None or launch.why_no_rank():
        return ""
    started = size()
    if started == world_size:
        return ""
    return f"a launcher has started {started} ranks; the test is for {world_size}"


def begin(
    world_size: int,
    case: launch.Case,
    directory: Path,
    timeout: float | None,
    test: unittest.TestCase | None = None,
    may_differ: bool = False,
    sanitize: Sanitize | None = None,
) -> Round:
    """Begin a test together with all ranks, or raise why that is not possible. Skips a test of another world size."""
    __tracebackhide__ = True
    from torch_testing_ext.launch.launched.meeting import WrongRound

    check_launch(test)
    why = wrong_size(world_size)
    if why:
        raise Skipped(TestSkip(TEST_SKIPS["small_worldsize"].exit_code, why))
    try:
        sanitize = sanitize or Sanitize()
        _say_if_hashes_are_alike(sanitize)
        return _member().of_this_process().begin(case, str(directory), timeout, may_differ, sanitize)
    except WrongRound as error:
        wrong = launch.Verdict(launch.TestOutcome.ERROR, str(error))
    raise rank_error(wrong, test)


@functools.cache
def _say_if_hashes_are_alike(sanitize: Sanitize) -> None:
    """Say once, in rank 0, that ranks cannot differ in their order of sets."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    if SanitizeKind.HASH in sanitize.kinds and seed != "random" and is_first():
        text = f"PYTHONHASHSEED={seed} is set, so all ranks of the launcher have the same order of sets"
        show_to_user(text)


def refuse(what: str) -> None:
    """Skip what would start ranks in each of the ranks of a launcher."""
    if this_launch() is not None:
        check_launch()
        reason = f"{what} starts ranks of its own, and a launcher has started this process as one of {size()}"
        raise Skipped(TestSkip(TEST_SKIPS["generic"].exit_code, reason))


def stop_if_asked(result: Any) -> None:
    """Stop a run of unittest if the launcher wants this process to end."""
    if _member().is_ending():
        with suppress(AttributeError):
            result.stop()


class InPlace(Host):
    """A test in this process, which a launcher has started as a rank. It gets the verdict on all ranks."""

    kind = HostKind.LAUNCHED

    def __init__(self, body: Callable[[launch.RankContext], object], test: unittest.TestCase | None = None):
        self._body = body
        self._test = test
        self._round: Round | None = None

    @property
    def directory(self) -> Path:
        """The folder for the files of all ranks: that of rank 0."""
        assert self._round is not None
        return Path(self._round.directory)

    def refusal(self, what: str, why: str) -> Exception:
        return rank_error(launch.Verdict(launch.TestOutcome.ERROR, f"{what}: {why}"), self._test)

    def start(self, attempt: RankAttempt) -> None:
        """Begin the test together with all ranks. Skips a test of another world size."""
        plan = attempt.plan
        self._round = begin(
            plan.world_size,
            plan.case,
            attempt.directory,
            attempt.timeout,
            self._test,
            plan.expected.may_differ,
            attempt.sanitize,
        )

    def judge(self, attempt: RankAttempt) -> RanksEnd:
        """Run the test, and let rank 0 judge all ranks."""
        assert self._round is not None
        verdict = run(self._round, self._body)
        if self._test is not None:
            stop_if_asked(getattr(self._test, "_result", None))
        return RanksEnd((), verdict)


def run(together: Round, body: Callable[[launch.RankContext], object]) -> launch.Verdict:
    """Run `body` here, and return the verdict on all ranks. The process goes on: nothing of it is left to its end."""
    from torch_testing_ext.launch.rank_collectives import begin_sanitizing, collectives_of_test, end_of_sanitizing

    member = _member().of_this_process()
    account = launch.AccountWriter(None)
    context = launch.RankContext(member.rank, member.world_size, Path(together.directory), account, fast_exit=False)
    with _variables(together), context.entered():
        rank_life.prepare_rank(context)
        had_group = _group_exists()
        try:
            with rank_accounts.recorded_account(account):
                begin_sanitizing(member.rank, together.sanitize, log_of(together.directory, member.rank))
                with warnings_in_rank.recorded_warnings(account):
                    body(context)
        except SystemExit as leaving:
            account.failed(leaving, assertion=False)
        with account.own_errors("in the tear-down of the process group: "):
            if not had_group:
                _end_groups()
        with account.own_errors():
            end_of_sanitizing()
        collectives = b""
        with account.own_errors("the collectives of this rank could not be read: "):
            collectives = collectives_of_test(more_follow=True)
        if account.account is None:
            account.passed()
    assert account.account is not None
    verdict = member.end(together, replace(account.account, collectives=collectives))
    if is_first():
        rank_warnings.warn_again(judged().accounts)
    return _here(verdict)


def _here(verdict: launch.Verdict) -> launch.Verdict:
    """The verdict as this rank shows it: rank 0 reports for all, if it is there."""
    if verdict.outcome is launch.TestOutcome.PASSED and not is_first():
        return replace(verdict, text="")
    if (
        is_first()
        or not verdict.message
        or verdict.outcome is launch.TestOutcome.SKIPPED
        or _member().of_this_process().is_alone
    ):
        return verdict
    first = verdict.message.partition("\n")[0]
    return replace(verdict, text=f"{first}\n\nRank 0 shows the report of all ranks.", failure=None, kept_as="")


@contextmanager
def _variables(together: Round) -> Iterator[None]:
    """The variables for `env://`: each test has a port of its own, since a used store would confuse the next group."""
    launched = this_launch()
    assert launched is not None
    own: dict[str, str | None] = {
        TORCHRUN.rank: str(launched.rank),
        TORCHRUN.local_rank: str(launched.local_rank),
        TORCHRUN.world_size: str(launched.world_size),
        ADDRESS: together.address,
        PORT: str(together.port),
    }
    with changed_environment(**own, **own_store(os.environ)):
        yield


def _group_exists() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def _end_groups() -> None:
    """Destroy the process groups that a test has made, with it: also to wake peers that wait for this rank."""
    if _group_exists():
        import torch.distributed as dist

        group_creation.wait_for_peers()
        # A young exception may refer to a group, which then keeps its connections.
        gc.collect(1)
        dist.destroy_process_group()
