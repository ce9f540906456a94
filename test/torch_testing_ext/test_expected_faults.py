"""Faults of tests: each happens at its point and nowhere else, and the verdict knows it."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import unittest
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.leftovers import nothing_left
from kit.outcomes import outcome_of
from kit.ranks import OnCpu, Ranks, stays_true

from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext.common_distributed import MultiThreadedTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.faults import (
    OPERATIONS as OPERATIONS_OF_CALLS,
    FaultPlan,
    abort,
    call,
    calls,
    exits,
    fault_point,
    fault_sweep,
    faults,
    heal,
    hold_gil,
    incarnation,
    kill,
    known,
    mark,
    raises,
    reached,
    restart,
    segv,
    slow,
    step,
    steps,
    stop,
    store,
)
from torch_testing_ext.launch import RankEnding, RankReport
from torch_testing_ext.launch.fault_checks import without_fault, without_recovery
from torch_testing_ext.launch.seen_faults import FaultsSeen

VICTIM = 1
FAULTS = {
    "kill": (kill(), "was killed"),
    "segv": (segv(), "was ended by SIGSEGV"),
    "abort": (abort(), "was ended by SIGABRT"),
    "exits": (exits(3), "exited with code 3"),
    "raises": (raises(ValueError("planned")), "raised ValueError"),
    "stop": (stop(0.02), "was stopped"),
    "slow": (slow(0.01), "was delayed"),
    "hold_gil": (hold_gil(0.01), "held the GIL"),
}
OPERATIONS = {
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(2)),
    "broadcast": lambda rank: dist.broadcast(torch.ones(2), 0),
    "reduce": lambda rank: dist.reduce(torch.ones(2), 0),
    "all_gather": lambda rank: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2)),
    "gather": lambda rank: dist.gather(torch.ones(2), None if rank else [torch.ones(2), torch.ones(2)]),
    "scatter": lambda rank: dist.scatter(torch.ones(2), None if rank else [torch.ones(2), torch.ones(2)]),
    "reduce_scatter": lambda rank: dist.reduce_scatter(torch.ones(2), [torch.ones(2), torch.ones(2)]),
    "all_to_all_single": lambda rank: dist.all_to_all_single(torch.ones(2), torch.ones(2)),
    "barrier": lambda rank: dist.barrier(),
    "monitored_barrier": lambda rank: dist.monitored_barrier(),
    "send": lambda rank: dist.send(torch.ones(2), 0) if rank else dist.recv(torch.ones(2), 1),
    "recv": lambda rank: dist.recv(torch.ones(2), 0) if rank else dist.send(torch.ones(2), 1),
}
# In these, the rank only sends, which may be over before its peer comes.
ONLY_SENDS = ("reduce", "gather", "send")
WORDS = {"before": "at", "during": "during", "after": "after"}


class Subject(Ranks):
    """Each rank passes three points; the survivor fails then, so that the message tells what has happened."""

    def passing(self, point):
        """In a rank: pass three points, and send how many it came through."""
        came_through = 0
        try:
            with contextlib.suppress(RuntimeError):
                for _ in range(3):
                    # The parent reads how far a rank came that dies.
                    Path(os.environ["TELL"], f"{self.rank}-{came_through}").touch()
                    point()
                    came_through += 1
        except ValueError:
            self.assertEqual(self.rank, VICTIM)
        if self.rank != VICTIM:
            raise AssertionError("the survivor says so")


def subject_of(planned, point, needs_group=True):
    """A test case in which the survivors fail."""

    @faults(planned, within=20)
    def runs(self):
        if needs_group:
            # gloo sometimes misses that a peer is gone: then this ends the call.
            self.join_group(timeout=timedelta(seconds=5))
        self.passing(lambda: point(self.rank))

    return type("Planned", (Subject,), {"runs": runs})("runs")


class EachPointTest(unittest.TestCase):
    """The methods are made below: one for each fault, phase and kind of operation."""

    def check(self, planned, point, told, needs_group=True):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TELL=folder):
            seen = outcome_of(subject_of(planned, point, needs_group))
            passed = [file.name for file in Path(folder).iterdir() if file.name.startswith(f"{VICTIM}-")]
        survivor = "rank 0 of 2 failed: AssertionError: the survivor says so"
        self.assertEqual(title_of(seen), f"after rank {VICTIM} {told} by the fault: {survivor}")
        goes_on = planned.kind in ("stop", "slow", "hold_gil")
        self.assertEqual(len(passed), 3 if goes_on else 2, passed)


def title_of(seen):
    """The first line of the message of a failure."""
    return seen.message.partition("Rank")[2].partition(": ")[2].partition("\n")[0]


def _optimizer_step(rank):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight]).step()


def _store_operation(rank):
    dist.HashStore().set("key", "value")


OTHER_POINTS = {
    "step": (step(2), _optimizer_step, "optimizer step #2"),
    "store": (store(2, op="set"), _store_operation, "set on a store #2"),
    "mark": (mark("the name", 2), lambda rank: fault_point("the name"), "'the name' #2"),
}
# The first step of an optimizer imports for seconds.
AT_STEPS = ("kill", "raises")


def planned_at(fault, at):
    return replace(FAULTS[fault][0], rank=VICTIM, at=at)


def cases():
    """Yield a name, the fault, the point, and what the message says, for each test."""
    for fault, (_, did) in FAULTS.items():
        for phase, word in WORDS.items():
            at = call(2, "all_reduce", phase=phase)
            point = OPERATIONS["all_reduce"]
            yield f"{fault}_{phase}_all_reduce", planned_at(fault, at), point, f"{did} {word} all_reduce #2"
        for where, (at, point, what) in OTHER_POINTS.items():
            if where != "step" or fault in AT_STEPS:
                yield f"{fault}_at_{where}", planned_at(fault, at), point, f"{did} at {what}", False
    for op, point in OPERATIONS.items():
        for phase, word in WORDS.items():
            cannot = phase == "during" and op in (*ONLY_SENDS, "monitored_barrier")
            if op != "all_reduce" and not cannot:
                told = f"was killed {word} {op}" + ("" if op in ("send", "recv") else " #2")
                yield f"kill_{phase}_{op}", planned_at("kill", call(2, op, phase=phase)), point, told
    for where in ("step", "store"):
        at, point, what = OTHER_POINTS[where]
        at = replace(at, phase="after")
        yield f"kill_after_{where}", planned_at("kill", at), point, f"was killed after {what}", False


for _name, *_arguments in cases():
    setattr(EachPointTest, f"test_{_name}", lambda self, given=tuple(_arguments): self.check(*given))


class Recovering(Ranks):
    """Subjects with three ranks, of which the last one has the faults."""

    world_size = 3

    def loses_a_peer(self, calls=4):
        self.join_group()
        with self.assertRaises(RuntimeError):
            for _ in range(calls):
                dist.all_reduce(torch.ones(2))

    @faults(kill(2, at=call(3, "all_reduce")), within=20)
    def passes(self):
        self.loses_a_peer()

    @faults(kill(2, at=call(9, "all_reduce")))
    def never(self):
        self.join_group()
        dist.barrier()
        dist.all_reduce(torch.ones(2))

    @faults(kill(2, at=call(2, group="pair")), within=20)
    def in_group(self):
        self.join_group()
        dist.all_reduce(torch.ones(1))
        pair = dist.new_group([1, 2], group_desc="pair")
        if self.rank:
            dist.all_reduce(torch.ones(1), group=pair)
            with self.assertRaises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=pair)

    @faults(kill(2, at=call(2, group=(1, 2))), within=20)
    def in_group_by_members(self):
        Recovering.in_group.__wrapped__(self)

    @faults(kill(2, at=mark("there")))
    def another_dies(self):
        if self.rank == 1:
            os._exit(7)
        fault_point("there")

    @faults(kill(2, at=mark("there")))
    def victim_fails_first(self):
        if self.rank == 2:
            raise KeyError("own")

    @faults(kill(2, at=mark("there")), within=0.2)
    def hangs(self):
        fault_point("there")
        while self.rank == 0:
            time.sleep(0.01)

    @faults(kill(2, at=mark("there")), within=1)
    def waits_for_the_dead(self):
        self.join_group()
        store = dist.FileStore(self.file_name + ".2", 3)
        fault_point("there")
        store.wait(["of rank 2"])

    @faults(slow(0.05, 2, at=mark("there")), within=0.2)
    def late(self):
        fault_point("there")
        if self.rank == 0:
            # Until it is ended: on a loaded machine, rank 2 may come any time later.
            time.sleep(1000)

    @faults(kill(2, at=mark("there")), must_reach=["recovered", "loaded"])
    def does_not_recover(self):
        self.join_group()
        fault_point("there")
        # It fails only after the fault.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        reached("recovered")

    @faults(stop(rank=2, at=mark("there")), within=20)
    def healed(self):
        self.join_group()
        fault_point("there")
        if self.rank == 0:
            heal(2)
        dist.all_reduce(torch.ones(1))

    @faults(stop(rank=2, at=mark("there")), within=20)
    def never_healed(self):
        fault_point("there")

    @faults(kill(2, at=mark("there")), restart(2), within=20, must_reach=["again"])
    def restarted(self):
        fault_point("there")
        if self.incarnation:
            reached("again")
        self.assertEqual(os.environ["TORCHELASTIC_RESTART_COUNT"], str(incarnation()))
        self.assertEqual(self.incarnation, incarnation())
        self.join_group()
        total = torch.ones(1)
        dist.all_reduce(total)
        self.assertEqual(total.item(), 3)

    @faults(raises(KeyError("planned"), rank=2, at=mark("there")), restart(2), within=20)
    def restarted_after_exception(self):
        fault_point("there")

    @faults(kill(2, at=mark("there")), restart(2), within=20)
    def fails_again(self):
        fault_point("there")
        if self.incarnation:
            raise KeyError("again")

    @faults(kill(2, at=call(2)), kill(1, at=call(3)), within=20)
    def two_die(self):
        self.loses_a_peer()
        if self.rank < 2:
            with self.assertRaises(RuntimeError):
                dist.all_reduce(torch.ones(1))

    def one_connects_slowly(self, passes_point):
        """Rank 0 is still making the group when the others have made it: has the fault happened by then?"""
        happened = Path(f"{self.file_name}.happened")

        class SlowGroup(dist.ProcessGroupGloo):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                assert stays_true(lambda: not happened.exists()), "the fault has happened"

        slow = SlowGroup if self.rank == 0 else dist.ProcessGroupGloo
        with mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", slow):
            self.join_group()
        if self.rank == 2:
            with self.assertRaises(TimeoutError):
                passes_point()
            happened.touch()

    @faults(raises(TimeoutError("planned"), rank=2, at=call(1)), within=20)
    def slow_before_a_call(self):
        self.one_connects_slowly(dist.barrier)

    @faults(raises(TimeoutError("planned"), rank=2, at=mark("there")), within=20)
    def slow_before_a_mark(self):
        self.one_connects_slowly(lambda: fault_point("there"))

    @faults(raises(TimeoutError("planned"), rank=2, at=call(1)), within=20)
    def handles_exception(self):
        self.join_group()
        if self.rank == 2:
            with self.assertRaises(TimeoutError):
                dist.barrier()
        dist.barrier()


class ServedCase(unittest.TestCase):
    """The server is there from the beginning, and counted before and after."""

    @classmethod
    def setUpClass(cls):
        outcome_of(Recovering("never"))


class VerdictTest(ServedCase):
    def check(self, name, outcome, title=""):
        with nothing_left(self):
            seen = outcome_of(Recovering(name))
        self.assertEqual(seen.outcome, outcome, seen.message)
        self.assertIn(title, title_of(seen))
        return seen

    def test_expected_death(self):
        self.check("passes", "passed")

    def test_fault_that_does_not_happen(self):
        told = "did not happen: rank 2 came to 1 all_reduce call (in all: 1 barrier, 1 all_reduce)"
        self.check("never", "failed", f"kill(rank=2, at=call(9, 'all_reduce')) {told}")

    def test_groups(self):
        self.check("in_group", "passed")
        self.check("in_group_by_members", "passed")

    def test_call_that_was_over_before(self):
        plan = FaultPlan((kill(0, at=call(1, "reduce", phase="during")),))
        seen = FaultsSeen.of([{"event": "missed", "fault": 0, "place": "reduce #1"}], plan)
        title, ranks = without_fault([RankReport(0, RankEnding.PASSED, faults=seen)], plan)
        self.assertEqual(ranks, (0,))
        told = "did not happen: reduce #1 was over before it could: use phase='before' or 'after'"
        self.assertEqual(title, f"kill(rank=0, at=call(1, 'reduce', phase='during')) {told}")

    def test_peers_that_still_make_a_group(self):
        """Else it depends on the machine's load which call of theirs misses the rank."""
        self.check("slow_before_a_call", "passed")
        self.check("slow_before_a_mark", "passed")

    def test_other_death(self):
        seen = self.check("another_dies", "error", "rank 1 of 3 exited with code 7")
        self.assertIn("after rank 2 was killed at 'there' #1 by the fault: ", title_of(seen))

    def test_victim_that_fails_before(self):
        self.check("victim_fails_first", "error", "rank 2 of 3 raised KeyError: 'own'")

    def test_hang_after_a_fault(self):
        told = "after rank 2 was killed at 'there' #1 by the fault: timed out after"
        self.check("hangs", "error", told)

    def test_wait_for_the_dead(self):
        seen = self.check("waits_for_the_dead", "error", "rank 2 was killed at 'there' #1 by the fault")
        self.assertIn("store.wait", seen.message)

    def test_late(self):
        self.check("late", "error", "after rank 2 was delayed at 'there' #1 by the fault: timed out after")

    def test_late_by_less_than_is_seen_at_once(self):
        plan = FaultPlan((slow(1, 0, at=mark("there")),), within=0.2)
        seen = FaultsSeen.of([{"event": "fault", "fault": 0, "place": "at 'there' #1", "at": 10.0}], plan)
        ranks = [RankReport(0, RankEnding.PASSED, faults=seen), RankReport(1, RankEnding.PASSED, ended=10.5)]
        told = "rank 1 ended 0.5 s after rank 0 was delayed at 'there' #1 by the fault; within=0.2"
        self.assertEqual(without_recovery(ranks, plan), (told, (1,)))
        self.assertIsNone(without_recovery(ranks, replace(plan, within=1.0)))

    def test_line_that_must_run(self):
        told = "no rank has reached 'loaded'; reached were 'recovered'"
        self.check("does_not_recover", "failed", f"after rank 2 was killed at 'there' #1 by the fault: {told}")

    def test_healed(self):
        self.check("healed", "passed")

    def test_stopped_for_good(self):
        self.check("never_healed", "passed")

    def test_restart(self):
        self.check("restarted", "passed")
        self.check("restarted_after_exception", "passed")

    def test_failure_of_the_second_process(self):
        self.check("fails_again", "error", "by the fault: rank 2 of 3 raised KeyError: 'again'")

    def test_two_faults(self):
        self.check("two_die", "passed")

    def test_exception_that_is_handled(self):
        self.check("handles_exception", "passed")


class Swept(Ranks):
    def loses_a_peer(self, handled=3):
        self.join_group()
        for number in range(3):
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError:
                if number >= handled:
                    raise
                return

    @fault_sweep(kill, exits(3), at=calls(), within=20)
    def survives(self):
        self.loses_a_peer()

    @fault_sweep(kill, at=calls(), within=20)
    def not_in_the_last_call(self):
        self.loses_a_peer(2)

    @fault_sweep(kill, at=calls(), ranks=[1], within=20, known=[known(kill(1, at=call(3)), "not yet")])
    def known_failure(self):
        self.loses_a_peer(2)

    @fault_sweep(kill, at=calls(), ranks=[1], within=20, known=[known(kill(1, at=call(2)), "not yet")])
    def known_failure_that_passes(self):
        self.loses_a_peer()

    @fault_sweep(slow(0.01), at=calls(), ranks=[1], known=[known(slow(0.01, 1, at=call(9)), "not yet")])
    def known_failure_at_no_point(self):
        self.join_group()

    @fault_sweep(slow(0.01), at=calls(phase="after"))
    def fails_without_faults(self):
        self.fail("by itself")

    @fault_sweep(kill, at=calls(phase="during"), ranks=[1], within=20)
    def during(self):
        self.loses_a_peer()


class SweepTest(ServedCase):
    def check(self, name, outcome, *lines):
        with nothing_left(self):
            seen = outcome_of(Swept(name))
        self.assertEqual(seen.outcome, outcome, seen.message)
        for line in lines:
            self.assertIn(line, seen.message)

    @pytest.mark.slow
    def test_all_are_survived(self):
        self.check("survives", "passed")
        self.check("during", "passed")

    def test_some_are_not_survived(self):
        self.check(
            "not_in_the_last_call",
            "error",
            "2 of 6 faults fail this test; the first: kill(rank=0, at=call(3)) at all_reduce #3: error: ",
            "kill(rank=0, at=call(1)) at all_reduce #1: recovered",
            "kill(rank=1, at=call(3)) at all_reduce #3: error: after rank 1 was killed at all_reduce #3 by the fault: ",
        )

    def test_known_failures(self):
        self.check("known_failure", "passed")
        told = (
            "1 known to fail it does so no more; the first: kill(rank=1, at=call(2)) at all_reduce #2: passes, though"
        )
        self.check("known_failure_that_passes", "failed", f"{told} known to fail: not yet")
        gone = "slow(0.01, rank=1, at=call(9)): there is no such point any more; known to fail: not yet"
        self.check("known_failure_at_no_point", "failed", f"1 known to fail it does so no more; the first: {gone}")

    def test_failure_without_faults(self):
        told = "This was the run without faults, which shows at which points they are to happen."
        self.check("fails_without_faults", "failed", "by itself", told)


class Persistent(OnCpu):
    @faults(kill(1, at=call(2)), within=20)
    def loses_a_peer(self):
        dist.barrier()
        with self.assertRaises(RuntimeError):
            dist.all_reduce(torch.ones(1))

    @faults(exits(3, 1, at=call(7)))
    def never(self):
        dist.barrier()

    @faults(kill(1, at=call(1)), restart(1))
    def restarts(self):
        pass

    @fault_sweep(kill, at=calls(), within=20)
    def swept(self):
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1))

    def sums(self):
        dist.all_reduce(torch.ones(1))


class OtherRanksTest(ServedCase):
    def test_persistent_ranks(self):
        with nothing_left(self):
            suite = unittest.TestSuite(
                map(Persistent, ("sums", "loses_a_peer", "sums", "never", "restarts", "swept", "sums"))
            )
            result = unittest.TestResult()
            suite.run(result)
        failed = [(test._testMethodName, text) for test, text in (*result.failures, *result.errors)]
        self.assertEqual([name for name, _ in failed], ["never", "restarts"], failed)
        self.assertIn("exits(3, rank=1, at=call(7)) did not happen: rank 1 came to 1 collective call", failed[0][1])
        self.assertIn("restart(1) needs ranks of its own for each test: use MultiProcessTestCase", failed[1][1])

    def test_threads(self):
        class Threads(MultiThreadedTestCase):
            world_size = 2

            def setUp(self):
                super().setUp()
                self._spawn_threads()

            @faults(kill(1, at=call(1)))
            def dies(self):
                pass

        self.assertIn("its ranks are threads, of which none can die alone", outcome_of(Threads("dies")).message)

    def test_without_ranks(self):
        class Plain(unittest.TestCase):
            @faults(kill(1, at=call(1)))
            def dies(self):
                pass

        self.assertIn("does not run in ranks that can die: use MultiProcessTestCase", outcome_of(Plain("dies")).message)


class BadInputTest(unittest.TestCase):
    def refuses(self, text, make):
        with self.assertRaisesRegex(ValueError, text):
            make()

    def test_points(self):
        self.refuses("n is 0; the first has number 1, so give 1 or more", lambda: call(0))
        self.refuses("n is True", lambda: step(True))
        self.refuses("there is no such operation. Did you mean: all_reduce", lambda: call(1, "allreduce"))
        self.refuses(r"the number comes first, as in call.2, 'all_reduce'", lambda: call("all_reduce", 2))
        self.refuses(r"the number comes first, as in call.1, 'barrier'", lambda: call("barrier"))
        self.refuses("there is no such operation. Known are set, get", lambda: store(1, op="put"))
        self.refuses("known phases are before, during, after", lambda: call(1, phase="within"))
        self.refuses("monitored_barrier returns only", lambda: call(1, "monitored_barrier", phase="during"))
        self.refuses("only calls can be in flight; use phase='before'", lambda: step(1, phase="during"))
        self.refuses("give the name that the code gives", lambda: mark(""))
        for wrong in (3, (), ""):
            self.refuses("give a group: its name, or a list of ranks", lambda wrong=wrong: call(1, group=wrong))
        self.refuses("a rank is a number, 0 or more", lambda: call(1, group=["dp"]))

    def test_faults(self):
        self.refuses("a rank is a number, 0 or more", lambda: kill(-1))
        self.refuses("an exit code is a number from 0 to 255", lambda: exits(256))
        self.refuses("give a number of seconds greater than 0", lambda: slow(0))
        self.assertEqual(kill(1, at="all_reduce"), kill(1, at=call(1, "all_reduce")))
        self.refuses("there is no such operation. Did you mean: all_reduce", lambda: kill(1, at="allreduce"))
        self.refuses("give a point, such as", lambda: kill(1, at=3))
        self.refuses("give a number of seconds greater than 0", lambda: stop("2"))
        self.refuses("give the seconds that it lasts", lambda: hold_gil("2"))
        self.refuses("give an exception", lambda: raises("text"))
        with self.assertRaisesRegex(TypeError, "give an exception that is made"):
            raises(UnicodeDecodeError)

        class Local(Exception):
            pass

        self.refuses("define it at the level of a module", lambda: raises(Local()))

    def test_plans(self):
        self.refuses("@faults takes faults", lambda: faults())
        self.refuses("@faults takes faults", lambda: faults(kill))
        self.refuses("say which rank and where", lambda: faults(kill(1)))
        twice = kill(1, at=call(1)), stop(rank=1, at=call(1))
        self.refuses("two faults at call.1.; give each a point of its own", lambda: faults(*twice))
        self.refuses("no fault ends that rank", lambda: faults(stop(rank=1, at=call(1)), restart(1)))
        self.refuses("give a number of seconds", lambda: faults(kill(1, at=call(1)), within=0))
        self.refuses("give a list of names", lambda: faults(kill(1, at=call(1)), must_reach="name"))
        self.refuses("is for a test, and Ranks is a class", lambda: faults(kill(1, at=call(1)))(Ranks))
        one, other = faults(kill(1, at=call(1))), fault_sweep(kill, at=calls())
        for outer, inner in ((one, one), (one, other), (other, one)):
            twice = partial(outer, inner(lambda self: None))
            self.refuses("this test has faults already; give it all in one decorator", twice)

    def test_sweeps(self):
        self.refuses("takes faults without rank and point", lambda: fault_sweep(kill(1, at=call(1)), at=calls()))
        self.refuses("takes faults without rank and point", lambda: fault_sweep(at=calls()))
        self.refuses("give calls.. or steps..", lambda: fault_sweep(kill, at=call(1)))
        self.refuses("only calls can be in flight", lambda: steps(phase="during"))
        self.refuses("@fault_sweep is for a test, and Ranks is a class", lambda: fault_sweep(kill, at=calls())(Ranks))
        self.refuses("takes a fault with its rank and point", lambda: known(kill(), "why"))
        self.refuses("say why it fails", lambda: known(kill(1, at=call(1)), " "))
        for wrong in (1, [], "1"):
            self.refuses(
                'give "all", or a list of ranks', lambda wrong=wrong: fault_sweep(kill, at=calls(), ranks=wrong)
            )
        self.refuses("a rank is a number, 0 or more", lambda: fault_sweep(kill, at=calls(), ranks=[-1]))
        self.refuses("give a reason: known", lambda: fault_sweep(kill, at=calls(), known=[kill(1, at=call(1))]))

    def test_known_failures_that_a_sweep_does_not_try(self):
        others = (
            stop(2, rank=1, at=call(1)),
            kill(0, at=call(1)),
            kill(1, at=call(1, "barrier")),
            kill(1, at=call(1, phase="after")),
            kill(1, at=step(1)),
        )
        fault_sweep(kill, at=calls(), ranks=[1], known=[known(kill(1, at=call(1)), "why")])
        for other in others:
            with self.subTest(other=str(other)):
                make = partial(fault_sweep, kill, at=calls(), ranks=[1], known=[known(other, "why")])
                self.refuses("the sweep tries no such fault, but faults such as kill.rank=1, at=call.1..", make)

    def test_rank_out_of_range(self):
        """It fails that test alone: the others of its file run."""
        late = type("Late", (Ranks,), {"dies": faults(kill(2, at=call(1)))(lambda self: None), "world_size": None})
        late.world_size = 2
        swept = {"dies": fault_sweep(kill, at=calls(), ranks=[2])(lambda self: None)}
        for bad in (
            type("Bad", (Ranks,), {"dies": faults(kill(2, at=call(1)))(lambda self: None)}),
            type("Swept", (Ranks,), swept),
            late,
        ):
            with self.subTest(bad=bad.__name__):
                message = outcome_of(bad("dies")).message
                self.assertIn("the test has 2 ranks; give a rank from 0 to 1", message)

    def test_operations_are_those_of_the_hook(self):
        self.assertEqual({known["kind"] for known in operation_hook.KNOWN.values()}, set(OPERATIONS_OF_CALLS))


class CostTest(unittest.TestCase):
    def test_import_brings_nothing_else(self):
        """In a new interpreter. What it costs is measured by benchmarks/fault_points.py."""
        source = (
            "import sys; before = set(sys.modules); import torch_testing_ext.fault_points; "
            "print(*sorted(set(sys.modules) - before))"
        )
        done = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, check=True)
        ours = [name for name in done.stdout.split() if name != "collections.abc"]  # a name of a part of Python's start
        self.assertEqual(ours, ["torch_testing_ext", "torch_testing_ext.fault_points"])


class GroupOfProgram(dist.ProcessGroup):
    """A group in Python around a backend, as those that survive the loss of a member have it."""

    def __init__(self, file_name, rank):
        super().__init__(rank, 2)
        self.backend = dist.ProcessGroupGloo(dist.FileStore(file_name, 2), rank, 2, timedelta(seconds=1000))

    def allreduce(self, tensors, options=None):
        return self.backend.allreduce(tensors)

    def broadcast(self, tensors, options=None):
        return self.backend.broadcast(tensors, dist.BroadcastOptions())


class OwnGroups(Ranks):
    def calls_three_times(self, group):
        with contextlib.suppress(RuntimeError):
            for _ in range(3):
                group.allreduce([torch.ones(2)]).wait()
            return
        reached("lost")

    @faults(kill(1, at=call(2, "all_reduce")), must_reach=["lost"])
    def a_backend(self):
        self.calls_three_times(GroupOfProgram(f"{self.file_name}.own", self.rank).backend)

    @faults(kill(1, at=call(2, "all_reduce", phase="after")), must_reach=["lost"])
    def a_subclass(self):
        self.calls_three_times(GroupOfProgram(f"{self.file_name}.own", self.rank))

    @faults(kill(1, at=call(3)), must_reach=["lost"])
    def a_subclass_beside_the_default_group(self):
        """The first call of the group lets no rank die while the other still connects."""
        self.join_group()
        dist.barrier()
        self.calls_three_times(GroupOfProgram(f"{self.file_name}.own", self.rank))

    @faults(raises(OSError, rank=0, at=call(1, "broadcast")))
    def an_exception(self):
        group = GroupOfProgram(f"{self.file_name}.own", self.rank)
        if self.rank == 0:
            with self.assertRaises(OSError):
                group.broadcast([torch.ones(2)])
        group.broadcast([torch.ones(2)]).wait()

    @faults(kill(1, at=call(4, "all_reduce")))
    def too_few(self):
        group = GroupOfProgram(f"{self.file_name}.own", self.rank)
        for _ in range(2):
            group.allreduce([torch.ones(2)]).wait()
        group.broadcast([torch.ones(2)]).wait()

    @faults(kill(1, at=call(3)), must_reach=["lost"])
    def a_group_of_torch_counts_once(self):
        self.join_group()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        dist.group.WORLD.allreduce([tensor]).wait()
        self.assertEqual(tensor.tolist(), [4.0, 4.0])
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(tensor)
            return
        reached("lost")


class OwnGroupsTest(unittest.TestCase):
    """Calls of backends, and of groups in Python around them, are calls."""

    def test_faults_at_calls(self):
        for name in (
            "a_backend",
            "a_subclass",
            "a_subclass_beside_the_default_group",
            "an_exception",
            "a_group_of_torch_counts_once",
        ):
            with self.subTest(name):
                self.assertEqual(outcome_of(OwnGroups(name)), ("passed", ""))

    def test_too_few_calls(self):
        told = "did not happen: rank 1 came to 2 all_reduce calls (in all: 2 all_reduce, 1 broadcast)"
        self.assertIn(told, outcome_of(OwnGroups("too_few")).message)


if __name__ == "__main__":
    run_tests()
