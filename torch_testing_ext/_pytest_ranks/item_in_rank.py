"""The rank's side of a marked test: it finishes the set-up, runs the test, and accounts for how it ended.

A rank is forked when the test is about to be called. It has everything that was set up by then, the collected items
and pytest's plugins among it. These judge the test in the rank as they would without ranks: a plugin that fails a test
which has not raised fails the rank.
"""

from __future__ import annotations

import logging
import sys
import traceback
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._cases.rank_life import run_rank
from torch_testing_ext._marks.needs import TEST_SKIPS
from torch_testing_ext._process import messages
from torch_testing_ext._utils.contexts import changed_environment

from . import debugging, dist_env, passed_warnings, pytest_internals, reports
from .marks import RankSpec
from .reports import Ending

__rank_frame__ = True


class PartFailed(AssertionError):
    """A plugin reports a failure that the test has not raised, as of a subtest. In a rank it ends the test."""

    def __init__(self, report: Any):
        judged = reports.judge(report)
        context = getattr(getattr(report, "context", None), "kwargs", None)
        super().__init__(f"in subtest {context}: {judged.title}" if context else judged.title)
        self.text = judged.text


@dataclass(frozen=True)
class RankExtras:
    """The part of a rank's account that only pytest understands."""

    xfail: str | None = None  # the reason, if its failure was expected
    has_quit: bool = False  # the user has quit the debugger
    properties: tuple[tuple[str, Any], ...] = ()  # of the report


@dataclass
class RankTest:
    """The test that ranks run, as the parent has set it up: they inherit it."""

    item: Any
    spec: RankSpec
    debug_rank: int | None = None  # the rank that has the terminal
    has_quit: bool = False  # the user has quit its debugger


def is_rank() -> bool:
    """Is this process a rank of a marked test?"""
    context = launch.current_context()
    return context is not None and isinstance(context.inherited, RankTest)


def _here() -> tuple[launch.RankContext, RankTest]:
    """Return the context of this rank, and the test that it runs."""
    context = launch.current_context()
    assert context is not None
    return context, context.inherited


def make_dist_env() -> Iterator[dist_env.DistEnv]:
    """Make the value of the fixture `dist_env`."""
    context, test = _here()
    return dist_env.make(test.spec, context.directory, context.rank)


def read_extras(of: launch.RankReport | launch.RankAccount | None) -> RankExtras:
    """Read the extras in a rank's account or report; none if the rank died before it wrote them."""
    kinds = messages.by_name(RankExtras)
    return messages.from_json(of.extras, kinds) if of is not None and of.extras else RankExtras()


def log_file(directory: Path, rank: int) -> Path:
    """The file for the records of `logging`."""
    return directory / f"rank{rank}.logging"


def run(context: launch.RankContext) -> None:
    """Run the test as the body of a rank."""
    test: RankTest = context.inherited

    def body() -> None:
        if context.rank != test.debug_rank:
            debugging.never_ask(test.item.config)
        with _own_capture(context):
            _run_and_judge(test.item, context.account)

    run_rank(context, body, reports_imports=True)


def run_in_place(item: Any, account: launch.AccountWriter) -> None:
    """Run the test in a process that a launcher has started as a rank."""
    _run_and_judge(item, account, judges_again=True)
    # Whatever refers to a group keeps its connections open, and with them the peers that wait for this rank.
    item.funcargs.clear()


def _run_and_judge(item: Any, account: launch.AccountWriter, judges_again: bool = False) -> None:
    """Run the test and let pytest's plugins judge it. `judges_again`: they will in this process, when it is over."""
    known = len(item.user_properties)
    _, test = _here()
    with warnings.catch_warnings(record=True) as seen, changed_environment(**dict(test.spec.environ)):
        call = pytest.CallInfo.from_call(lambda: _run_item(item, account), "call")
    parent_knows_xfail = pytest_internals.is_marked_xfail(item)
    if not parent_knows_xfail:
        pytest_internals.read_xfail_marks(item)
    report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    judged = reports.judge(report)
    is_xpass = judged.ending is Ending.STRICT_XPASS and (parent_knows_xfail or judges_again)
    if report.failed and not is_xpass:
        # Of an error that was raised there is an account already, which is kept.
        account.failed(PartFailed(report), assertion=True, traceback=judged.text)
    elif judged.ending is Ending.SKIPPED and account.account is None:
        _account_for_skip(account, judged.reason)
    xfail = judged.reason if judged.ending is Ending.EXPECTED_FAILURE else None
    properties = tuple((str(name), _plain(value)) for name, value in item.user_properties[known:])
    extras = RankExtras(xfail, test.has_quit, properties)
    account.add(map(passed_warnings.pack, seen), messages.to_json(extras))
    if call.excinfo is not None:
        traceback.clear_frames(call.excinfo.tb)


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: a report file has the text of any other."""
    return value if value is None or type(value) in (str, int, float, bool) else str(value)


def _run_item(item: Any, account: launch.AccountWriter) -> None:
    """Set up the fixtures of ranks, run the test, and tear these fixtures down; account for an error at once."""
    finalizers = pytest_internals.finalizers(item)
    of_parent = finalizers[:]  # which runs them; in the ranks of a launcher, this process
    finalizers.clear()
    try:
        for name in _left_out(item):
            del item.funcargs[name]
        pytest_internals.fill_fixtures(item)
        type(item).runtest(item)
        for error in pytest_internals.kept_errors(item):
            _account_for(item, error, account)
    except BaseException as error:
        _account_for(item, error, account)
        context, test = _here()
        if context.rank == test.debug_rank:
            test.has_quit = debugging.look_at(item, error)
        raise
    finally:
        _tear_down(item, finalizers, account)
        finalizers.extend(of_parent)


def _tear_down(item: Any, finalizers: list[Any], account: launch.AccountWriter) -> None:
    if (postponed := pytest_internals.postponed_tear_down(item)) is not None:
        finalizers.append(postponed)
    errors: list[BaseException] = []
    while finalizers:
        try:
            finalizers.pop()()
        except BaseException as error:
            errors.append(error)
            _account_for(item, error, account, "in the tear-down of a fixture: ")
    if errors:
        raise errors[0]


LEFT_OUT: pytest.StashKey[tuple[str, ...]] = pytest.StashKey()


def _left_out(item: Any) -> tuple[str, ...]:
    """The fixtures that the parent has not set up."""
    names: tuple[str, ...] = item.stash.get(LEFT_OUT, ())
    return names


# -- how it ended


def _account_for(item: Any, error: BaseException, account: launch.AccountWriter, within: str = "") -> None:
    if isinstance(error, pytest.skip.Exception) and not within:
        _account_for_skip(account, error.msg or "")
        return
    if isinstance(error, unittest.SkipTest) and not within:
        _account_for_skip(account, str(error))
        return
    try:
        if isinstance(error, PartFailed):
            text = error.text
        else:
            text = str(item.repr_failure(pytest.ExceptionInfo.from_exception(error)))
    except Exception:
        text = launch.format_error(error)
    account.failed(error, isinstance(error, (AssertionError, pytest.fail.Exception)), within, text)


def _account_for_skip(account: launch.AccountWriter, reason: str) -> None:
    generic = TEST_SKIPS["generic"]
    account.skipped(reason or generic.message, generic.exit_code)


def on_report(report: Any) -> None:
    """Fail a rank by a report that a part of the test makes of its own, since nothing here collects it."""
    if report.failed:
        raise PartFailed(report)


# -- output


@contextmanager
def _own_capture(context: launch.RankContext) -> Iterator[None]:
    """Detach from what pytest captures in the parent: this process has descriptors and files of its own."""
    config = context.inherited.item.config
    pytest_internals.forget_captured(config)
    handlers = pytest_internals.log_handlers(config)
    if handlers is None:
        yield
        return
    of_terminal, of_report = handlers
    logging.getLogger().removeHandler(of_terminal)  # which is the parent's
    with open(log_file(context.directory, context.rank), "w", errors="backslashreplace", buffering=1) as file:
        of_report.setStream(file)
        try:
            yield
        finally:
            of_report.setStream(sys.stderr)  # for what is logged until this process ends
