"""Tests which tests run again, and which results are final: as tables, without processes."""

from kit.invented import make_attempt

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.engine.results_of_tests import Results
from torch_testing_ext.runner.events import TestFinished, Warned
from torch_testing_ext.runner.model import RankLog, Test, TestId, Unit
from torch_testing_ext.runner.options import CountAs, Options

PASSED, FAILED, SKIPPED, LEAKED = TestOutcome.PASSED, TestOutcome.FAILED, TestOutcome.SKIPPED, TestOutcome.LEAKED
A, B = (Test(TestId("test_x.py", "T", name)) for name in ("test_a", "test_b"))


def attempts(retries=0, leaked=CountAs.PASS):
    known = Results(Options(retries=retries, leaked=leaked), lambda event: known.events.append(event), lambda why: None)
    known.events = []
    return known


def run(known, *outcomes, message="", may_retry=True, **more):
    """Take an attempt with each outcome. Returns which are retried."""
    taken = (make_attempt(A, outcome, message, number=number, **more) for number, outcome in enumerate(outcomes, 1))
    return [known.take(attempt, may_retry) for attempt in taken]


class TestAttempts(TestCase):
    def test_which_attempts_are_retried(self):
        lenient, strict = CountAs.PASS, CountAs.FAIL
        for retries, leaked, outcomes, retried, result in (
            (0, lenient, [PASSED], [False], "passed"),
            (0, lenient, [FAILED], [False], "failed"),
            (2, lenient, [FAILED, PASSED], [True, False], "flaky"),
            (2, lenient, [FAILED, FAILED, FAILED], [True, True, False], "failed"),
            (1, lenient, [SKIPPED], [False], "skipped"),
            (1, lenient, [LEAKED], [False], "leaked"),
            (1, strict, [LEAKED, PASSED], [True, False], "flaky"),
        ):
            with self.subTest(retries=retries, outcomes=outcomes, leaked=leaked):
                known = attempts(retries, leaked)
                self.assertEqual(run(known, *outcomes), retried)
                (finished,) = (event.finished for event in known.events if isinstance(event, TestFinished))
                self.assertEqual((finished.outcome.value, len(finished.attempts)), (result, len(outcomes)))
                self.assertEqual(known.failures, result == "failed")

    def test_no_retry_when_the_run_stops(self):
        self.assertEqual(run(attempts(retries=3), FAILED, may_retry=False), [False])

    def test_a_failure_that_others_may_have_caused_is_retried_once_and_alone_whatever_the_retries(self):
        for known_cause, warning in (
            ({"port_in_use": True}, "a port was in use"),
            # Of a process that the test has started itself.
            ({"output": "RuntimeError: [Errno 98] EADDRINUSE: Address already in use"}, "a port was in use"),
            ({"ranks": (RankLog(0, "bind: address already in use", ""),)}, "a port was in use"),
            ({"evicted": True}, "it was terminated because node  was short of memory"),
        ):
            with self.subTest(known_cause):
                known = attempts()
                self.assertFalse(known.must_be_alone([A], 0))
                retried = run(known, FAILED, FAILED, **known_cause)
                self.assertEqual(retried, [True, False])
                self.assertEqual([known.must_be_alone([one], 0) for one in (A, B)], [True, False])
                (text,) = (event.text for event in known.events if isinstance(event, Warned))
                self.assertTrue(text.startswith(f"{A.id}: {warning}"), text)

    def test_a_retry_that_never_came_fails_at_the_end(self):
        known = attempts(retries=1)
        self.assertEqual(run(known, FAILED), [True])
        for _ in range(2):
            (finished,) = known.summary(1.0, False, "").finished
            self.assertEqual((finished.outcome, known.failures), (FAILED, 1))

    def test_a_test_runs_again_only_once_after_its_node_was_lost(self):
        known = attempts()
        unit = Unit(0, (A, B))
        self.assertEqual(known.lose(unit, [A], "node a was lost"), ((A,), []))
        again, twice = known.lose(unit, [A, B], "node b was lost")
        self.assertEqual((again, [test for test, _ in twice]), ((B,), [A]))
        self.assertRegex(twice[0][1], "first, node a was lost; then, node b was lost")
        # Another attempt, or another repetition, of the same test has its own chance.
        self.assertEqual(known.lose(Unit(1, (A,), attempt=2), [A], "x"), ((A,), []))
        self.assertEqual(known.lose(Unit(2, (A,), repetition=1), [A], "x"), ((A,), []))

    def test_tests_without_a_result(self):
        known = attempts()
        known.leave(Unit(0, (A, B)), [A, B])
        known.leave(Unit(1, (B,), repetition=1), [B])
        run(known, PASSED)
        self.assertEqual(known.summary(1.0, False, "").unfinished, (B,))


if __name__ == "__main__":
    run_tests()
