"""Tests the outcomes that follow from a worker's reports and its end: as tables, without processes."""

from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.engine.unit_log import EndCause, UnitLog, WorkerExit
from torch_testing_ext.runner.model import Test, TestId, TestOutcome, Unit
from torch_testing_ext.runner.processes.protocol import Began, Ended, FixtureFailed, Missing, WorkerBroke

FINE = WorkerExit(EndCause.ITSELF, at=9.0, code=0)


def began(test):
    return Began(test, at=1.0 + test, printed=10 * test)


def ended(test, outcome="passed", message=""):
    return Ended(test, 1.5 + test, TestOutcome(outcome), message, want=None, printed=10 * test + 5, ranks=())


def fixture(message, skipped=False):
    return FixtureFailed(message, skipped, want=None)


def log_of(*messages, tests=1):
    all_tests = tuple(Test(TestId("test_x.py", "T", f"test_{number}")) for number in range(tests))
    log = UnitLog(Unit(0, all_tests), tuple(t.id.dotted for t in all_tests), tuple(f"run {t.id}" for t in all_tests))
    for message in messages:
        log.add(message)
    return log


def outcomes(log, end):
    results, rest = log.finish(end)
    return {result.test: result.outcome.value for result in results}, rest


class TestOneTest(TestCase):
    def test_how_it_ends(self):
        over, running = (began(0), ended(0)), (began(0),)
        killed = WorkerExit(EndCause.ITSELF, 9.0, -9)
        late = WorkerExit(EndCause.DEADLINE, 9.0, -15)
        for messages, end, outcome in (
            (over, FINE, "passed"),
            ((began(0), ended(0, "failed", "x")), FINE, "failed"),
            (running, FINE, "crashed"),
            (running, killed, "crashed"),
            (running, late, "timeout"),
            ((), late, "timeout"),
            (running, WorkerExit(EndCause.LOST, 9.0, lost="its watcher died"), "crashed"),
            ((), WorkerExit(EndCause.LOST, 9.0, lost="its watcher died"), "crashed"),
            ((), FINE, "error"),
            ((*running, WorkerBroke("KeyboardInterrupt", at=2.0)), WorkerExit(EndCause.ITSELF, 9.0, 1), "error"),
            ((Missing(0),), FINE, "error"),
            # After its end: the process of a test that passed must exit properly, too.
            (over, killed, "crashed"),
            (over, late, "passed"),
            (over, WorkerExit(EndCause.ITSELF, 9.0, 0, ("pid 7: sleep",)), "leaked"),
            ((began(0), ended(0, "failed", "x")), WorkerExit(EndCause.ITSELF, 9.0, 0, ("pid 7: sleep",)), "failed"),
        ):
            with self.subTest(messages=messages, end=end):
                self.assertEqual(outcomes(log_of(*messages), end), ({0: outcome}, []))

    def test_an_interrupted_test_has_no_outcome(self):
        self.assertEqual(outcomes(log_of(began(0)), WorkerExit(EndCause.INTERRUPTED, 9.0, -15)), ({}, []))

    def test_the_message_of_a_death_has_cause_time_place_and_command(self):
        (result,), _ = log_of(began(0)).finish(WorkerExit(EndCause.ITSELF, 3.5, -11, stacks="File x in y"))
        title, stacks, command = result.message.split("\n\n")
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
        self.assertEqual(outcomes(log, FINE), ({1: "passed"}, []))

    def test_class_fixtures(self):
        for messages, expected in (
            ((fixture("setUpClass"),), {0: "error", 1: "error"}),
            ((fixture("no", skipped=True),), {0: "skipped", 1: "skipped"}),
            ((began(0), ended(0), began(1), ended(1), fixture("tearDownClass")), {0: "passed", 1: "error"}),
        ):
            with self.subTest(messages=messages):
                self.assertEqual(outcomes(log_of(*messages, tests=2), FINE), (expected, []))

    def test_a_test_that_was_not_run_is_reported(self):
        self.assertEqual(outcomes(log_of(began(0), ended(0), tests=2), FINE), ({0: "passed", 1: "error"}, []))


if __name__ == "__main__":
    run_tests()
