"""Tests the outcomes that follow from a worker's reports and its end: as tables, without processes."""

from dataclasses import replace

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.engine.unit_log import EndCause, UnitLog, WorkerExit
from torch_testing_ext.runner.model import Test, TestEnd, TestId, Unit
from torch_testing_ext.runner.processes.worker_messages import (
    AllOver,
    Began,
    Ended,
    FixtureBegan,
    FixtureEnded,
    FixtureFailed,
    NotRun,
    WorkerBroke,
)

FINE = WorkerExit(EndCause.ITSELF, at=9.0, code=0)
EVICTED = WorkerExit(EndCause.MEMORY, at=9.0, code=-9, lost="the node was at 91 %", evicted=True)


def began(test):
    return Began(test, at=1.0 + test, printed=10 * test)


def ended(test, outcome="passed", message=""):
    return Ended(test, 1.5 + test, TestEnd(TestOutcome(outcome), message), printed=10 * test + 5, ranks=())


def sets_up(*tests):
    return FixtureBegan("setUpClass (T)", 1.0, tests)


def tears_down():
    return FixtureBegan("tearDownClass (T)", 4.0, ())


def fixture_failed():
    return FixtureFailed(FailureView.of_text("no"))


def not_run(test, outcome="error", message="setUpClass (T): no"):
    return NotRun(test, 1.0, TestEnd(TestOutcome(outcome), message))


def result_of(test, log, end):
    return next(result for result in log.finish(end)[0] if result.test == test)


def log_of(*messages, tests=1):
    all_tests = tuple(Test(TestId("test_x.py", "T", f"test_{number}")) for number in range(tests))
    log = UnitLog(Unit(0, all_tests), tuple(t.id.dotted for t in all_tests), tuple(f"run {t.id}" for t in all_tests))
    for message in messages:
        log.add(message)
    return log


def outcomes(log, end):
    results, rest = log.finish(end)
    return {result.test: result.attempt.outcome.value for result in results}, rest


class TestOneTest(TestCase):
    def test_how_it_ends(self):
        over, running = (began(0), ended(0), AllOver()), (began(0),)
        killed = WorkerExit(EndCause.ITSELF, 9.0, -9)
        late = WorkerExit(EndCause.DEADLINE, 9.0, -15)
        for messages, end, outcome in (
            (over, FINE, "passed"),
            ((began(0), ended(0, "failed", "x"), AllOver()), FINE, "failed"),
            (running, FINE, "crashed"),
            (running, killed, "crashed"),
            (running, late, "timeout"),
            ((), late, "timeout"),
            (running, WorkerExit(EndCause.LOST, 9.0, lost="its watcher died"), "crashed"),
            ((), WorkerExit(EndCause.LOST, 9.0, lost="its watcher died"), "crashed"),
            (running, EVICTED, "crashed"),
            ((), EVICTED, "crashed"),
            (over, EVICTED, "crashed"),
            ((began(0), ended(0)), EVICTED, "crashed"),
            (over, replace(EVICTED, code=0), "passed"),
            ((), FINE, "crashed"),
            ((AllOver(),), FINE, "error"),
            ((*running, WorkerBroke("KeyboardInterrupt")), WorkerExit(EndCause.ITSELF, 9.0, 1), "error"),
            ((not_run(0), AllOver()), FINE, "error"),
            # After its end: the process of a test that passed must exit properly, too.
            (over, killed, "crashed"),
            (over, late, "timeout"),
            # It exited with code 0, and has not said that everything was over.
            ((began(0), ended(0)), FINE, "crashed"),
            ((began(0), ended(0)), late, "timeout"),
            ((began(0), ended(0)), WorkerExit(EndCause.LOST, 9.0, lost="its watcher died"), "crashed"),
            ((began(0), ended(0), WorkerBroke("an error of ours")), FINE, "error"),
            # Its end is known, although nobody watched its process exit.
            (over, WorkerExit(EndCause.LOST, 9.0, lost="its watcher died"), "passed"),
            (over, WorkerExit(EndCause.ITSELF, 9.0, 0, ("pid 7: sleep",)), "leaked"),
            (
                (began(0), ended(0, "failed", "x"), AllOver()),
                WorkerExit(EndCause.ITSELF, 9.0, 0, ("pid 7: sleep",)),
                "failed",
            ),
        ):
            with self.subTest(messages=messages, end=end):
                self.assertEqual(outcomes(log_of(*messages), end), ({0: outcome}, []))

    def test_a_timeout_says_whether_sigterm_was_enough(self):
        for messages in ((began(0),), (), (began(0), ended(0))):
            for code, says in ((-15, "; it was terminated"), (-9, "; SIGTERM did not end it in 0.2 s, SIGKILL did")):
                with self.subTest(messages=messages, code=code):
                    (result,), _ = log_of(*messages).finish(WorkerExit(EndCause.DEADLINE, 9.0, code))
                    self.assertIn(says, result.attempt.said)

    def test_a_test_that_passes_after_its_deadline_has_timed_out(self):
        """The signal that asks for its stacks may end the wait in which it hangs."""
        for outcome, expected in (("passed", "timeout"), ("failed", "failed"), ("skipped", "skipped")):
            with self.subTest(outcome=outcome):
                log = log_of(began(0), ended(0, outcome, "x"), began(1), ended(1), AllOver(), tests=2)
                log.overdue[0] = "here"
                self.assertEqual(outcomes(log, FINE), ({0: expected, 1: "passed"}, []))
        log = log_of(began(0), ended(0), AllOver())
        log.overdue[0] = "here"
        said = result_of(0, log, FINE).attempt.said
        self.assertIn("T.test_0 timed out after 0.5 s; it ended when its stacks were taken", said)
        self.assertIn("here", said)

    def test_ended_for_the_memory_of_the_node(self):
        """Only the test that was hit runs again: it is the one that is marked."""
        log = log_of(began(0), ended(0), began(1), tests=3)
        (handed_out,) = log.certain()
        (hit,), rest = log.finish(EVICTED)
        self.assertEqual((hit.test, hit.attempt.evicted, rest), (1, True, [2]))
        self.assertIn("it was terminated 7.0 s into T.test_1: the node was at 91 %", hit.attempt.said)
        self.assertFalse(handed_out.attempt.evicted)
        (alone,), _ = log_of(began(0)).finish(replace(EVICTED, evicted=False))
        self.assertFalse(alone.attempt.evicted)
        (passed,), _ = log_of(began(0), ended(0), AllOver()).finish(replace(EVICTED, code=0))
        self.assertFalse(passed.attempt.evicted)

    def test_an_interrupted_test_has_no_outcome(self):
        self.assertEqual(outcomes(log_of(began(0)), WorkerExit(EndCause.INTERRUPTED, 9.0, -15)), ({}, []))

    def test_every_test_has_a_result_or_is_left_after_any_end(self):
        reports = {
            "nothing": (),
            "a test runs": (began(0),),
            "a test has ended": (began(0), ended(0)),
            "the second one runs": (began(0), ended(0), began(1)),
            "a set-up runs": (sets_up(0, 1, 2),),
        }
        for name, messages in reports.items():
            for cause in EndCause:
                if cause is EndCause.INTERRUPTED:  # an interrupted test has no outcome
                    continue
                with self.subTest(reports=name, cause=cause):
                    results, rest = outcomes(log_of(*messages, tests=3), WorkerExit(cause, 9.0, 1, lost="gone"))
                    self.assertEqual(sorted([*results, *rest]), [0, 1, 2])

    def test_the_message_of_a_death_has_cause_time_place_and_command(self):
        (result,), _ = log_of(began(0)).finish(WorkerExit(EndCause.ITSELF, 3.5, -11, stacks="File x in y"))
        title, stacks, command = result.attempt.said.split("\n\n")
        self.assertEqual(title, "the test's process was killed by SIGSEGV 2.5 s into T.test_0")
        self.assertIn("File x in y", stacks)
        self.assertEqual(command, "To run it alone:\n  run test_x.py::T::test_0")


class TestSeveralTests(TestCase):
    def test_the_rest_runs_in_another_process(self):
        log = log_of(began(0), ended(0), began(1), tests=4)
        self.assertEqual(outcomes(log, WorkerExit(EndCause.ITSELF, 9.0, -9)), ({0: "passed", 1: "crashed"}, [2, 3]))

    def test_each_new_unit_has_one_test_less(self):
        """Also if the worker dies before its first test: no unit is run forever."""
        self.assertEqual(outcomes(log_of(tests=2), WorkerExit(EndCause.ITSELF, 9.0, 4)), ({0: "crashed"}, [1]))

    def test_results_are_given_once_and_the_last_one_late(self):
        log = log_of(began(0), ended(0), tests=2)
        self.assertEqual(log.certain(), [])  # its tearDownClass may fail yet
        log.add(began(1))
        self.assertEqual([result.test for result in log.certain()], [0])
        self.assertEqual(log.certain(), [])
        log.add(ended(1))
        log.add(AllOver())
        self.assertEqual(outcomes(log, FINE), ({1: "passed"}, []))

    def test_fixtures_that_fail(self):
        torn_down = (
            began(0),
            ended(0),
            began(1),
            ended(1),
            tears_down(),
            fixture_failed(),
            FixtureEnded(),
        )
        for messages, expected in (
            ((sets_up(0, 1), FixtureEnded(), not_run(0), not_run(1)), {0: "error", 1: "error"}),
            ((not_run(0, "skipped"), not_run(1, "skipped")), {0: "skipped", 1: "skipped"}),
            (torn_down, {0: "passed", 1: "error"}),
            # The set-up of one class skips its test, the other class fails.
            ((not_run(0, "skipped"), not_run(1)), {0: "skipped", 1: "error"}),
            # The first class's tear-down fails, the second class skips.
            (
                (began(0), ended(0), fixture_failed(), not_run(1, "skipped")),
                {0: "error", 1: "skipped"},
            ),
            (
                (began(0), ended(0), fixture_failed(), began(1), ended(1)),
                {0: "error", 1: "passed"},
            ),
            # A module's tear-down fails, although no test ran.
            (
                (not_run(0, "skipped"), not_run(1, "skipped"), fixture_failed()),
                {0: "skipped", 1: "error"},
            ),
        ):
            with self.subTest(messages=messages):
                self.assertEqual(outcomes(log_of(*messages, AllOver(), tests=2), FINE), (expected, []))

    def test_a_tear_down_that_fails_between_two_classes_changes_a_result_before_it_is_given(self):
        log = log_of(
            began(0),
            ended(0),
            tears_down(),
            fixture_failed(),
            FixtureEnded(),
            began(1),
            tests=2,
        )
        (first,) = log.certain()
        self.assertEqual((first.attempt.outcome, first.attempt.said), (TestOutcome.ERROR, "after the test: no"))

    def test_a_failure_after_a_result_that_was_given_goes_to_the_last_test(self):
        log = log_of(began(0), ended(0), began(1), tests=2)
        log.certain()
        for message in (fixture_failed(), ended(1), AllOver()):
            log.add(message)
        self.assertEqual(outcomes(log, FINE), ({1: "error"}, []))

    def test_asking_for_the_results_changes_nothing(self):
        reports = [
            sets_up(0, 1),
            FixtureEnded(),
            began(0),
            ended(0),
            tears_down(),
            fixture_failed(),
            AllOver(),
        ]
        for cause in EndCause:
            for length in range(len(reports)):
                with self.subTest(cause=cause, length=length):
                    log, end = log_of(*reports[:length], tests=2), WorkerExit(cause, 9.0, 1, ("pid 7",))
                    self.assertEqual(log.finish(end), log.finish(end))

    def test_a_failing_test_keeps_its_message_when_its_tear_down_fails_too(self):
        log = log_of(began(0), ended(0, "failed", "1 != 2"), tears_down(), fixture_failed(), AllOver())
        result = result_of(0, log, FINE)
        self.assertEqual(
            (result.attempt.outcome.value, result.attempt.said), ("failed", "1 != 2\n\nafter the test: no")
        )

    def test_the_worker_ends_within_a_tear_down(self):
        for end, outcome, title in (
            (FINE, "crashed", "the test's process exited with code 0 5.0 s into tearDownClass (T)"),
            (WorkerExit(EndCause.DEADLINE, 9.0, -15), "timeout", "tearDownClass (T) timed out after 5.0 s"),
            (WorkerExit(EndCause.LOST, 9.0, lost="x"), "crashed", "it was terminated 5.0 s into tearDownClass (T)"),
        ):
            with self.subTest(end=end):
                log = log_of(began(0), ended(0), tears_down(), tests=2)
                (result,), rest = log.finish(end)
                self.assertEqual((result.test, result.attempt.outcome.value, rest), (0, outcome, [1]))
                self.assertTrue(result.attempt.said.startswith(f"after the test: {title}"), result.attempt.said)

    def test_the_worker_hangs_in_a_set_up(self):
        """One failure, with the time that it took; the other tests of the class would only hang again."""
        late = WorkerExit(EndCause.DEADLINE, 9.0, -15, stacks="File x in setUpClass")
        results, rest = log_of(sets_up(0, 1, 2), tests=4).finish(late)
        self.assertEqual(
            [(one.test, one.attempt.outcome.value) for one in results], [(0, "timeout"), (1, "error"), (2, "error")]
        )
        self.assertEqual(rest, [3])
        self.assertTrue(results[0].attempt.said.startswith("setUpClass (T) timed out after 8.0 s; it was terminated\n"))
        self.assertIn("in setUpClass", results[0].attempt.said)
        self.assertEqual(results[0].attempt.seconds, 8.0)
        for one in results[1:]:
            self.assertTrue(
                one.attempt.said.startswith("not run: setUpClass (T) timed out after 8.0 s"), one.attempt.said
            )

    def test_the_worker_hangs_before_its_first_test(self):
        results, rest = log_of(tests=2).finish(WorkerExit(EndCause.DEADLINE, 9.0, -15))
        self.assertEqual([one.attempt.outcome.value for one in results], ["timeout", "error"])
        self.assertIn("timed out after 9.0 s, before its first test", results[0].attempt.said)
        self.assertEqual(rest, [])

    def test_the_worker_dies_in_a_set_up(self):
        """Another process may get further."""
        log = log_of(began(0), ended(0), sets_up(1, 2), tests=3)
        self.assertEqual(outcomes(log, WorkerExit(EndCause.ITSELF, 9.0, -9)), ({0: "passed", 1: "crashed"}, [2]))

    def test_no_set_of_reports_that_ends_early_is_all_green(self):
        """Cut off the reports of a good run anywhere: some test is red, or still to be run."""
        reports = [
            *(sets_up(0, 1), FixtureEnded(), began(0), ended(0), began(1), ended(1)),
            *(tears_down(), FixtureEnded(), AllOver()),
        ]
        for cause in (EndCause.ITSELF, EndCause.DEADLINE, EndCause.LOST, EndCause.MEMORY):
            for length in range(len(reports)):
                results, rest = log_of(*reports[:length], tests=2).finish(WorkerExit(cause, 9.0, 0))
                with self.subTest(cause=cause, length=length):
                    self.assertNotEqual({one.attempt.outcome for one in results}, {TestOutcome.PASSED})
                    self.assertEqual(sorted([*rest, *(one.test for one in results)]), [0, 1])

    def test_a_test_that_was_not_run_is_reported(self):
        self.assertEqual(
            outcomes(log_of(began(0), ended(0), AllOver(), tests=2), FINE), ({0: "passed", 1: "error"}, [])
        )


if __name__ == "__main__":
    run_tests()
