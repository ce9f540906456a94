"""The rank's side of a marked test: it finishes the set-up, runs the test, and accounts for how it ended."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import os
import sys
import traceback
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._process import locks, messages
from torch_testing_ext._pytest_ranks import reports
from torch_testing_ext._pytest_ranks.debugger_of_rank import look_at, never_ask
from torch_testing_ext._pytest_ranks.dist_env import open_dist_env, rank_of
from torch_testing_ext._pytest_ranks.marks import DIST_ENV, RANKS, RankSpec, draw_for_all_ranks, read_marks
from torch_testing_ext._pytest_ranks.pytest_internals import (
    captured_output,
    failure_texts,
    item_fixtures,
    item_state,
)
from torch_testing_ext._testing.bases import rank_accounts
from torch_testing_ext._testing.bases.rank_life import run_rank
from torch_testing_ext._testing.bases.values_of_fixtures import DistEnv, Ranks
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext._torch.groups import collective_errors
from torch_testing_ext.launch.aspects import warnings_in_rank


class PartFailed(AssertionError):
    """A plugin reports a failure that the test has not raised, as of a subtest. In a rank it ends the test."""

    # The title of the report begins with that of the error.
    names_its_type = True

    def __init__(self, report: Any):
        judged = reports.judge(report)
        super().__init__(judged.title)
        self.text = judged.text


@dataclass(frozen=True)
class RankExtras:
    """The part of a rank's account that only pytest understands."""

    # The reason, if its failure was expected.
    xfail: str | None = None
    # The user has quit the debugger.
    has_quit: bool = False
    # The user properties of the report.
    properties: tuple[tuple[str, Any], ...] = ()


@dataclass
class RankTest:
    """The test that ranks run, as the parent has set it up: they inherit it."""

    item: Any
    spec: RankSpec
    # The rank that has the terminal.
    debug_rank: int | None = None
    # The user has quit its debugger.
    has_quit: bool = False
    # A descriptor, for log_cli and --setup-show.
    terminal: int | None = None


def is_rank() -> bool:
    """Whether this process is a rank of a marked test."""
    context = launch.current_context()
    return context is not None and isinstance(context.inherited, RankTest)


def _context_and_test() -> tuple[launch.RankContext, RankTest]:
    """Return the context of this rank, and the test that it runs."""
    context = launch.current_context()
    assert context is not None
    return context, context.inherited


def this_dist_env() -> Iterator[DistEnv]:
    context, test = _context_and_test()
    return open_dist_env(test.spec, context.directory, context.rank)


def this_rank() -> Ranks:
    """Make the value of the fixture `ranks`."""
    context, test = _context_and_test()
    return rank_of(test.spec, context.rank)


def read_extras(account: launch.RankAccount | None) -> RankExtras:
    """Read the extras in a rank's account; none if the rank died before it wrote them."""
    if account is None or not account.extras:
        return RankExtras()
    extras: RankExtras = messages.from_json(account.extras, messages.by_name(RankExtras))
    return extras


def log_file(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.logging"


def run_in_rank(context: launch.RankContext) -> None:
    """Run the test as the body of a rank."""
    test: RankTest = context.inherited

    def body() -> None:
        if context.rank != test.debug_rank:
            never_ask(test.item.config)
        with _own_capture(context):
            _run_and_judge(test.item, context.account)

    run_rank(context, body, reports_imports=True)


def run_in_world(context: launch.RankContext) -> None:
    """Run the test as a rank of a whole world."""
    test: RankTest = context.inherited
    never_ask(test.item.config)
    with _own_capture(context):
        _run_and_judge(test.item, context.account)


def run_shared(context: launch.RankContext) -> None:
    """Run tests that share their ranks, as the body of a rank. Wider fixtures are torn down after the last of them."""
    from torch_testing_ext.launch.tasks_of_ranks import tasks

    test: RankTest = context.inherited
    session = test.item.session
    item_fixtures.take_finalizers(test.item)
    item_fixtures.take_over(session, test.spec.scope, (DIST_ENV, RANKS))
    items = {item.nodeid: item for item in session.items}
    # The parent has begun each of the other tests in the same state.
    first = copy.copy(test.item)

    def body() -> None:
        if context.rank != test.debug_rank:
            never_ask(test.item.config)
        for task in tasks(context.directory, context.rank):
            test.item = items[task.name]
            _do_as_the_parent_did(test.item, first)
            with _own_capture(context):
                _run_and_judge(test.item, task.account)
            sys.stdout.flush()
            if task.account.account is None:
                task.account.passed()
        item_fixtures.tear_down_session(session)

    run_rank(context, body)


def _do_as_the_parent_did(item: Any, first: Any) -> None:
    """Repeat what plugins have done with a test in the parent, since these ranks were forked."""
    for name in vars(first).keys() - set(dir(item)):
        setattr(item, name, copy.copy(getattr(first, name)))
    captured_output.begin_caplog(item, first)
    os.environ["PYTEST_CURRENT_TEST"] = f"{item.nodeid} (call)"
    read_marks(item)
    draw_for_all_ranks(item)
    item_state.read_xfail_marks(item)
    done = pytest.CallInfo.from_call(lambda: None, "setup")
    item.ihook.pytest_runtest_makereport(item=item, call=done)


def run_in_place(item: Any, account: launch.AccountWriter) -> None:
    """Run the test in a process that a launcher has started as a rank."""
    _run_and_judge(item, account, judges_again=True)
    # Whatever refers to a group keeps its connections open, and with them the peers that wait for this rank.
    item.funcargs.clear()


def _run_and_judge(item: Any, account: launch.AccountWriter, judges_again: bool = False) -> None:
    """Run the test and let pytest's plugins judge it. `judges_again`: they will in this process, when it is over."""
    known = len(item.user_properties)
    _, test = _context_and_test()
    call = pytest.CallInfo.from_call(lambda: _run_and_record(item, account), "call")
    parent_knows_xfail = item_state.is_marked_xfail(item)
    if not parent_knows_xfail:
        item_state.read_xfail_marks(item)
    report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    judged = reports.judge(report)
    is_xpass = judged.passed_against_xfail and (parent_knows_xfail or judges_again)
    if report.failed and not is_xpass:
        # An error that was raised has an account already, which is kept.
        account.failed(PartFailed(report), assertion=True, traceback=judged.text)
    elif judged.outcome is TestOutcome.SKIPPED and account.account is None:
        rank_accounts.account_for_skip(account, judged.reason)
    xfail = judged.reason if judged.outcome is TestOutcome.EXPECTED_FAILURE else None
    properties = []
    for name, value in item.user_properties[known:]:
        properties.append((str(name), _plain(value)))
    extras = RankExtras(xfail, test.has_quit, tuple(properties))
    account.add((), messages.to_json(extras))
    if call.excinfo is not None:
        traceback.clear_frames(call.excinfo.tb)


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: a report file has the text of any other."""
    is_plain = value is None or type(value) in (str, int, float, bool)
    return value if is_plain else str(value)


def _run_and_record(item: Any, account: launch.AccountWriter) -> None:
    """Run the test and record its warnings, some of which may be errors."""
    try:
        with warnings_in_rank.recorded_warnings(account):
            _run_item(item, account)
    except BaseException as error:
        _account_for(item, error, account)
        raise


def _run_item(item: Any, account: launch.AccountWriter) -> None:
    """Set up the fixtures of ranks, run the test, and tear these fixtures down; account for an error at once."""
    context, test = _context_and_test()
    is_shared = test.spec.scope != "function"
    finalizers = [] if is_shared else item_fixtures.finalizers(item)
    # The parent runs them; in the ranks of a launcher, this process.
    of_parent = finalizers[:]
    finalizers.clear()
    try:
        if is_shared:
            item_fixtures.set_up_in_session(item)
        else:
            # The parent has not set these up.
            for name in item.stash.get(LEFT_OUT, ()):
                del item.funcargs[name]
            item_fixtures.fill_fixtures(item)
        _call(item)
        for error in item_state.kept_errors(item):
            _account_for(item, error, account)
    except BaseException as error:
        _account_for(item, error, account)
        if context.rank == test.debug_rank:
            test.has_quit = look_at(item, error)
        raise
    finally:
        if is_shared:
            _tear_down(item, item_fixtures.take_finalizers(item), account)
        else:
            _tear_down(item, finalizers, account)
        finalizers.extend(of_parent)


def _call(item: Any) -> None:
    """Call the test. A coroutine is run to its end here: the loop of a plugin belongs to the parent process."""
    function = item.obj
    is_async = inspect.iscoroutinefunction(function)
    is_wrapped = inspect.unwrap(function) is not function
    if item_state.is_of_unittest(item) or not (is_async or is_wrapped):
        type(item).runtest(item)
        return

    @functools.wraps(function)
    def called(**arguments: Any) -> Any:
        __tracebackhide__ = True
        result = function(**arguments)
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            pytest.fail("the function that was called returned a generator, and nothing of it has run", pytrace=False)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    item.obj = called
    # A plugin's own way to run a coroutine is not used.
    kind = pytest.Function if is_async else type(item)
    try:
        kind.runtest(item)
    finally:
        item.obj = function


def _tear_down(item: Any, finalizers: list[Any], account: launch.AccountWriter) -> None:
    """Run the finalizers, the last one first, and account for their errors. Raises the first of these."""
    postponed = item_state.postponed_tear_down(item)
    if postponed is not None:
        finalizers.append(postponed)
    errors: list[BaseException] = []
    while finalizers:
        finalize = finalizers.pop()
        try:
            finalize()
        except BaseException as error:
            errors.append(error)
            _account_for(item, error, account, "in the tear-down of a fixture: ")
    if errors:
        raise errors[0]


LEFT_OUT: pytest.StashKey[tuple[str, ...]] = pytest.StashKey()


def _account_for(item: Any, error: BaseException, account: launch.AccountWriter, within: str = "") -> None:
    """Account for an error as pytest would show it. `within`: the part of the test that raised it, as a prefix."""
    if isinstance(error, (pytest.skip.Exception, unittest.SkipTest)) and not within:
        rank_accounts.account_for_skip(account, str(error))
        return
    rank_accounts.stop_at_own(account, error)
    try:
        text = error.text if isinstance(error, PartFailed) else failure_texts.failure_text(item, error)
    except Exception:
        text = launch.format_error(error)
    is_assertion = isinstance(error, (AssertionError, pytest.fail.Exception))
    account.failed(error, is_assertion, within, text)


def on_report(report: Any) -> None:
    """Fail a rank by a report that a part of the test makes of its own, since nothing here collects it."""
    if report.failed:
        raise PartFailed(report)


@contextmanager
def _own_capture(context: launch.RankContext) -> Iterator[None]:
    """Detach from what pytest captures in the parent: this process has descriptors and files of its own."""
    item = context.inherited.item
    terminal = context.inherited.terminal
    captured_output.forget_captured(item.config)
    if terminal is None or context.rank > 0:
        item.config.option.setupshow = False
    else:
        stream = open(terminal, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        captured_output.redirect_terminal(item.config, stream)
    handlers = captured_output.log_handlers(item.config)
    if handlers is None:
        yield
        return
    of_terminal, of_report = handlers
    # The terminal is the parent's.
    captured_output.remove_log_handler(of_terminal)
    # The failure has this error.
    collective_errors.logger_of_errors().removeHandler(of_report)
    log = log_file(context.directory, context.rank)
    with _live_log(item, context), open(log, "w", 1, "utf-8", "backslashreplace") as file:
        of_report.setStream(file)
        try:
            yield
        finally:
            # What is logged until this process ends goes there.
            of_report.setStream(sys.stderr)


@contextmanager
def _live_log(item: Any, context: launch.RankContext) -> Iterator[None]:
    """With log_cli, show records on the terminal at once."""
    terminal = context.inherited.terminal
    style = captured_output.live_log(item.config)
    if terminal is None or style is None:
        yield
        return
    level, form = style
    handler = _LiveLog(terminal, context.directory / "live_log", item.nodeid, context.rank)
    handler.setLevel(level)
    handler.setFormatter(form)
    with captured_output.logging_to(handler):
        yield


class _LiveLog(logging.Handler):
    """Writes records to the terminal, the first one of a test below a title. Ranks take turns by a file."""

    def __init__(self, terminal: int, turn: Path, test: str, rank: int):
        super().__init__()
        self._terminal = terminal
        self._turn = turn
        self._test = test
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            lines = [f"[rank{self._rank}] {line}\n" for line in text.splitlines()]
            with locks.open_locked(self._turn, "a+") as turn:
                if turn.read() != self._test:
                    turn.truncate(0)
                    turn.write(self._test)
                    lines.insert(0, f"\n{' live log of ranks '.center(80, '-')}\n")
                os.write(self._terminal, "".join(lines).encode(errors="backslashreplace"))
        except Exception:
            self.handleError(record)
