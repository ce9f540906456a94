"""Events of invented runs, for the tests of the reports."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kit.invented import make_attempt
from torch_testing_ext._collectives.failure import FailureView, LineKind, RankRow, SourceLine, Value
from torch_testing_ext._collectives.lanes_of_ranks import RankLane, TimedCall
from torch_testing_ext._collectives.worlds.world_views import WorldCall, WorldClass, WorldView
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.events import (
    AttemptEnded,
    Event,
    RunBegan,
    RunEnded,
    TestBegan,
    TestFinished,
    UnitBegan,
    UnitEnded,
)
from torch_testing_ext.runner.model import Attempt, FinishedTest, Lease, Policy, RankLog, Summary, Test, TestId, Unit
from torch_testing_ext.runner.report.console import Console
from torch_testing_ext.runner.report.console_style import Styler
from torch_testing_ext.runner.report.recorder import Recorder
from torch_testing_ext.runner.report.terminal_stream import TerminalStream

MESSAGE = """rank 1 of 2 failed: AssertionError: 1 != 2

  rank 1: failed after 0.02 s: AssertionError: 1 != 2
  rank 0: passed after 0.01 s

rank 1's traceback:
  File "test_example.py", line 32, in test_{0}
    self.assertEqual(1, 2)"""
STACKS = 'Thread 0x00007f0084e0db80 (most recent call first):\n  File "test_example.py", line 27 in test_hang'


def a_test(method: str, file: str = "test/distributed/test_example.py", **more) -> Test:
    return Test(TestId(file, "ExampleTest", method), line=12, **more)


def attempt(method: str, outcome: TestOutcome = TestOutcome.PASSED, **more) -> Attempt:
    test = more.pop("test", None) or a_test(method, world_size=2)
    message = MESSAGE.format(method.removeprefix("test_")) if outcome.is_failure else ""
    return make_attempt(test, outcome, **{"message": message, "seconds": 0.25, "lease": Lease((), (0, 1)), **more})


def finished_test(method: str, *outcomes: TestOutcome, **more) -> FinishedTest:
    attempts = (attempt(method, one, number=number, **more) for number, one in enumerate(outcomes, 1))
    return FinishedTest(tuple(replace(one, began=one.began + one.number) for one in attempts))


def ranks(outputs: Sequence[str], stacks: str = "") -> tuple[RankLog, ...]:
    return tuple(RankLog(number, output, stacks) for number, output in enumerate(outputs))


_BEHIND, _AHEAD = Site("/x/test_x.py", 25, "test_hang"), Site("/x/test_x.py", 26, "test_hang")
HANG = FailureView(
    "rank 2 never reached all_reduce #2; ranks 0, 1, 3 are waiting in it",
    rows=(
        RankRow((2,), "after all_reduce #1 [4]", _BEHIND),
        RankRow((0, 1, 3), "in all_reduce #2 [4]", _AHEAD),
    ),
    sites=(_BEHIND, _AHEAD),
    source=(
        SourceLine("/x/test_x.py", 24, "        if self.rank == 2:"),
        SourceLine("/x/test_x.py", 25, '            time.sleep(1000)  # "for ever"'),
        SourceLine("/x/test_x.py", 26, "        dist.all_reduce(torch.ones(4))"),
    ),
    values=(Value("Expected: [5.0]", LineKind.EXPECTED), Value("Got:      [4.0]", LineKind.GOT)),
    show_command="python run_test.py show test_x.py::T::test_hang",
    rerun_command="python run_test.py test_x.py::T::test_hang",
    account="the account",
)
SCREEN = HANG.screen


def hang_of_ranks(size: int) -> FinishedTest:
    """A test that hung, since rank 2 did not come to the second call of all ranks. It began with the run."""
    clock = 1_790_000_000.0
    ranks = tuple(range(size))
    group = "the default group, 0"

    def lane(rank: int) -> RankLane:
        first = TimedCall("all_reduce #1 [4]", group, 1, clock + 1.0 + rank / 100, True, "test_x.py:20", ranks)
        second = TimedCall("all_reduce #2 [4]", group, 2, clock + 2.0, False, "test_x.py:26", ranks)
        return RankLane(rank, clock, clock + 0.5, clock + 4.0, "stopped", (first, second) if rank != 2 else (first,))

    logs = tuple(RankLog(rank, lane=lane(rank)) for rank in range(size))
    test = a_test("test_hang", world_size=size)
    one = attempt("", TestOutcome.TIMEOUT, test=test, message="", failure=HANG, ranks=logs, seconds=4.0)
    return FinishedTest((one,))


def finished_in_world(size: int) -> FinishedTest:
    """A test that passed in a whole world, whose rank 0 sends 2 KiB to each other rank of four blocks."""
    calls = (WorldCall("broadcast #1 [512]", "the default group", 2048, "test_x.py:7 in test_b"),)
    classes = (WorldClass((0,), 1, calls), WorldClass(tuple(range(1, size)), 2, (*calls, calls[0])))
    traffic = ((0, 2048, 2048, 1024), *[(0, 0, 0, 0)] * 3)
    view = WorldView(size, size // 4, traffic, classes, 2, ("test_x.py:9 in test_b",))
    one = attempt("", test=a_test("test_broadcast", world_size=size))
    return FinishedTest((replace(one, end=replace(one.end, worlds=(view,))),))


def every_outcome() -> tuple[FinishedTest, ...]:
    """One test of each outcome, and a file that cannot be imported."""
    simple = [one for one in TestOutcome if one not in (TestOutcome.SKIPPED, TestOutcome.FLAKY, TestOutcome.LEAKED)]
    broken = Test(TestId("test/distributed/test_broken.py"))
    want = a_test("test_large", world_size=4, devices=4)
    return (
        *(finished_test(f"test_{one.value.replace(' ', '_')}", one) for one in simple),
        finished_test("test_flaky", TestOutcome.FAILED, TestOutcome.ERROR, TestOutcome.PASSED),
        finished_test("test_leaked", TestOutcome.LEAKED, leftovers=("sleep 1000 (pid 17)",)),
        finished_test("test_skipped", TestOutcome.SKIPPED, message="no NCCL", lease=Lease()),
        finished_test(
            "", TestOutcome.SKIPPED, test=want, want="4 devices", message="Need at least 4 devices", lease=Lease()
        ),
        finished_test(
            "", TestOutcome.ERROR, test=broken, message="SyntaxError: invalid syntax\n  line 3", lease=Lease()
        ),
    )


def run_events(finished: Sequence[FinishedTest], policy: Policy | None = None, **run) -> Iterator[Event]:
    """The events of a run with these results, one unit for each attempt, one after the other."""
    tests = tuple({one.test.id: one.test for one in finished}.values())
    attempts = [(one, each) for one in finished for each in one.attempts]
    units = {id(each): Unit(number, (each.test,)) for number, (_, each) in enumerate(attempts)}
    first = tuple(units[id(one.attempts[0])] for one in finished)
    began = RunBegan(tests, first, **{"devices": (), "slots": 2, "clock": 1_790_000_000.0, **run})
    yield began
    for one, each in attempts:
        yield from _attempt(units[id(each)], each, retry=each is not one.last)
        if each is one.last:
            yield TestFinished(one)
    yield RunEnded(Summary(tuple(finished), seconds=12.5, policy=policy or Policy()))


def _attempt(unit: Unit, one: Attempt, retry: bool) -> Iterator[Event]:
    if one.outcome is not TestOutcome.SKIPPED:
        yield UnitBegan(unit, one.lease, one.began)
        yield TestBegan(one.test, unit, one.lease, one.began)
    yield AttemptEnded(one, retry)
    if one.outcome is not TestOutcome.SKIPPED:
        yield UnitEnded(unit, one.lease, one.began + one.seconds + 0.1)


def ended(finished: Sequence[FinishedTest], **summary) -> RunEnded:
    return RunEnded(Summary(tuple(finished), **{"seconds": 12.5, **summary}))


def send(reporter, events: Sequence[Event]) -> None:
    for event in events:
        reporter.on_event(event)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def printed(events, **options) -> str:
    """The console report of these events, without colours."""
    stream = io.StringIO()
    send(Console(TerminalStream(stream), Styler(coloured=False), **options), list(events))
    return stream.getvalue()


def history_of(finished, policy=None, interrupted=False, unfinished=(), warnings=(), **run):
    """The history of a run of these tests, as the reports that are written at the end get it."""
    *events, end = run_events(finished, policy, **run)
    end = RunEnded(replace(end.summary, interrupted=interrupted, unfinished=unfinished, warnings=warnings))
    recorder = Recorder()
    send(recorder, events)
    return recorder.history(end)
