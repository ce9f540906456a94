"""MultiProcessTestCase in the parent: how a test is created, started, joined and cleaned up."""

import functools
import os
import signal
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.outcomes import outcome_of
from kit.processes import files_not_kept
from kit.ranks import Ranks, ranks_told

from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext.common_distributed import TEST_SKIPS, MultiProcessTestCase, RankError, RankFailure, get_timeout
from torch_testing_ext.common_utils import TestCase, run_tests


class Things(Ranks):
    def passes(self):
        pass

    def pauses(self):
        threading.Event().wait()

    def pauses_until_a_signal(self):
        signal.pause()

    def fails(self):
        self.assertEqual(self.rank, 0)

    def raises(self):
        raise KeyError("k")

    @unittest.expectedFailure
    def fails_as_expected(self):
        self.fail("as expected")

    @unittest.expectedFailure
    def fails_as_expected_in_one_rank(self):
        self.assertEqual(self.rank, 0)

    @unittest.expectedFailure
    def passes_against_expectation(self):
        pass

    def skips(self):
        raise unittest.SkipTest("not today")

    def skips_by_method(self):
        self.skipTest("not today")

    def skips_by_pytest(self):
        pytest.skip("not today")

    @unittest.skip("never")
    def is_skipped(self):
        pass

    def exits_as_told(self):
        sys.exit(int(os.environ["EXIT"]))

    def meets(self):
        self.join_group()
        tensor = torch.tensor([self.rank + 1])
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 3)


class TestMaking(TestCase):
    def test_by_position_and_by_either_keyword(self):
        for test in (Things("passes"), Things(method_name="passes"), Things(methodName="passes")):
            self.assertEqual(test._testMethodName, "passes")
            self.assertEqual(outcome_of(test).outcome, "passed")

    def test_without_a_method(self):
        """unittest allows this, for interactive sessions."""
        self.assertEqual(Things()._testMethodName, "runTest")

    def test_unknown_method(self):
        with self.assertRaisesRegex(ValueError, "Things has no test method 'nothing'|no such test method.*nothing"):
            Things("nothing")

    def test_wrapped_is_the_bound_original(self):
        test = Things("passes")
        self.assertEqual(test.passes.__wrapped__, functools.partial(Things.passes).func.__get__(test))
        self.assertIs(test.passes.__wrapped__.__self__, test)
        self.assertIs(test.passes.__wrapped__.__func__, Things.passes)
        self.assertEqual(test.passes.__name__, "passes")
        self.assertIs(test.passes.__self__, test)

    def test_other_methods_are_left_alone(self):
        self.assertFalse(hasattr(Things("passes").fails, "__wrapped__"))

    def test_attributes_set_by_set_up(self):
        class Idle(MultiProcessTestCase):
            def passes(self):
                pass

        test = Idle("passes")
        with mock.patch("torch_testing_ext.launch.launch") as launch:
            test.setUp()
        self.addCleanup(test.doCleanups)
        launch.assert_not_called()
        self.assertEqual((test.rank, test.processes, test.pid_to_pipe), (-1, [], {}))
        self.assertEqual((test.skip_return_code_checks, test.special_return_code_checks), ([], {}))
        self.assertEqual(os.path.getsize(test.file_name), 0)
        self.assertTrue(os.path.isdir(os.path.dirname(test.file_name)))
        self.assertEqual(test.world_size, 4)

    def test_each_test_has_files_of_its_own(self):
        first, second = Things("passes"), Things("passes")
        for test in (first, second):
            test.setUp()
            self.addCleanup(test.doCleanups)
        self.assertNotEqual(first.file_name, second.file_name)

    def test_set_up_that_starts_no_ranks(self):
        class Forgetful(MultiProcessTestCase):
            def passes(self):
                pass

        seen = outcome_of(Forgetful("passes"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn("no ranks were started", seen.message)
        self.assertIn("Forgetful.setUp() must call self._spawn_processes()", seen.message)

    def test_set_up_without_super(self):
        class Hasty(MultiProcessTestCase):
            def setUp(self):
                self._spawn_processes()

            def passes(self):
                pass

        seen = outcome_of(Hasty("passes"))
        self.assertNotEqual(seen.outcome, "passed")
        self.assertIn("Hasty.setUp() must call super().setUp() first", seen.message)


class TestWorldSize(TestCase):
    def run_with(self, world_size):
        kind = type("Sized", (Things,), {"world_size": world_size, "passes": lambda self: self.tell(self.world_size)})
        return kind("passes")

    @pytest.mark.slow
    def test_forms(self):
        for given in (1, 3, "3", property(lambda self: 3), property(lambda self: "2")):
            with self.subTest(given=given):
                told = ranks_told(self.run_with(given))
                self.assertEqual(len(told), int(told[0]))

    def test_default(self):
        class Plain(Things):
            world_size = MultiProcessTestCase.world_size

            def passes(self):
                self.tell(self.rank)

        self.assertEqual(ranks_told(Plain("passes")), [0, 1, 2, 3])

    def test_invalid_world_sizes(self):
        for given in (0, -1, "0", "", "four", None, [2], 2.5, "2.5"):
            with self.subTest(given=given):
                seen = outcome_of(self.run_with(given))
                self.assertEqual(seen.outcome, "error")
                self.assertIn(
                    f"ValueError: {self.run_with(given).__class__.__qualname__}.world_size is {given!r}", seen.message
                )
                self.assertIn("it must be a number of ranks, 1 or more", seen.message)


class TestOutcomes(TestCase):
    def check(self, method, outcome, *parts, **environ):
        with mock.patch.dict(os.environ, environ):
            seen = outcome_of(Things(method))
        self.assertEqual(seen.outcome, outcome, seen.message)
        for part in parts:
            self.assertIn(part, seen.message)
        return seen.message

    def test_ranks_meet(self):
        self.check("meets", "passed")

    def test_failures_and_errors_are_distinguished(self):
        self.check("fails", "failed", "rank 1 of 2 failed", "Scalars are not equal", "rank 0: passed")
        self.check("raises", "error", "all 2 ranks raised", "KeyError: 'k'", "ranks 0, 1 failed in the same way")

    def test_raised_in_the_parent(self):
        for method, error in (("fails", RankFailure), ("raises", RankError)):
            test = Things(method)
            test.setUp()
            self.addCleanup(test.doCleanups)
            with self.assertRaises(error) as caught:
                getattr(test, method)()
            self.assertIsNone(caught.exception.__cause__)
        self.assertTrue(issubclass(RankFailure, AssertionError))
        self.assertTrue(issubclass(RankError, RuntimeError))

    def test_command_to_run_it_again(self):
        message = self.check("raises", "error")
        self.assertRegex(message, r"To run it alone:\n  python .*\bThings(\.|::)raises\b")

    def test_expected_failure(self):
        self.check("fails_as_expected", "expected failure")
        self.check("fails_as_expected_in_one_rank", "expected failure")
        self.check("passes_against_expectation", "unexpected success")

    def test_skip(self):
        self.assertEqual(self.check("skips", "skipped"), "not today")
        self.assertEqual(self.check("skips_by_method", "skipped"), "not today")
        self.assertEqual(self.check("skips_by_pytest", "skipped"), "not today")

    def test_skip_by_unittest_starts_nothing(self):
        with mock.patch("torch_testing_ext.launch.launch") as launch:
            self.assertEqual(self.check("is_skipped", "skipped"), "never")
        launch.assert_not_called()

    @pytest.mark.slow
    def test_every_skip_code(self):
        codes = sorted({skip.exit_code for skip in TEST_SKIPS.values()})
        self.assertEqual(codes, list(range(72, 90)))
        by_code = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        for code in codes:
            with self.subTest(code=code):
                self.assertEqual(self.check("exits_as_told", "skipped", EXIT=str(code)), by_code[code])

    def test_an_overriding_run_may_exit_after_the_test(self):
        """PyTorch's own TestDistBackend does so. An exit before the test, or with another code, is no pass."""

        class Leaves(Things):
            @classmethod
            def _run(cls, rank, test_name, file_name, pipe, **kwargs):
                if test_name == "leaves_at_once":
                    sys.exit(0)
                super()._run(rank, test_name, file_name, pipe, **kwargs)
                sys.exit(3 if test_name == "leaves_with_3" else 0)

            def leaves_at_once(self):
                pass

            def leaves_with_3(self):
                pass

        self.assertEqual(outcome_of(Leaves("passes")), ("passed", ""))
        self.assertIn("rank 1 of 2 failed", outcome_of(Leaves("fails")).message)
        self.assertIn("exited with code 0", outcome_of(Leaves("leaves_at_once")).message)
        self.assertIn("exited with code 3", outcome_of(Leaves("leaves_with_3")).message)

    def test_other_codes_are_no_skips(self):
        for code in (0, 71, 90):
            self.check(
                "exits_as_told", "error", f"exited with code {code} ", "before the test finished", EXIT=str(code)
            )


class Codes(Ranks):
    expected = None  # "any", or a code

    def setUp(self):
        super().setUp()
        original = getattr(self, self._testMethodName).__wrapped__
        if self.expected == "any":
            self.skip_return_code_checks.append(original)
        elif self.expected is not None:
            self.special_return_code_checks[original] = self.expected

    def all_exit_3(self):
        os._exit(3)

    def rank_1_exits_3(self):
        if self.rank == 1:
            os._exit(3)

    def all_abort(self):
        os.abort()

    def rank_0_aborts(self):
        if self.rank == 0:
            os.abort()

    def one_raises(self):
        if self.rank == 1:
            raise KeyError("k")
        os._exit(3)

    def passes(self):
        pass


class TestReturnCodes(TestCase):
    @pytest.mark.slow
    def test_table(self):
        abort = -signal.SIGABRT
        table = [
            ("all_exit_3", None, "error", "exited with code 3"),
            ("all_exit_3", "any", "passed", ""),
            ("all_exit_3", 3, "passed", ""),
            ("all_exit_3", 4, "failed", "rank 0 of 2 should have ended with exit code 4, but ended with exit code 3"),
            ("rank_1_exits_3", None, "error", "rank 1 of 2 exited with code 3"),
            ("rank_1_exits_3", "any", "passed", ""),
            ("rank_1_exits_3", 3, "failed", "but ended with exit code 0"),
            ("all_abort", None, "error", "killed by SIGABRT"),
            ("all_abort", "any", "passed", ""),
            ("all_abort", abort, "passed", ""),
            ("rank_0_aborts", abort, "passed", ""),
            ("passes", abort, "failed", "should have ended with exit code -6 (SIGABRT), but ended with exit code 0"),
            ("one_raises", "any", "error", "KeyError: 'k'"),
            ("one_raises", 3, "error", "KeyError: 'k'"),
        ]
        for method, expected, outcome, said in table:
            with self.subTest(method=method, expected=expected), mock.patch.object(Codes, "expected", expected):
                seen = outcome_of(Codes(method))
                self.assertEqual(seen.outcome, outcome, seen.message)
                self.assertIn(said, seen.message)

    def test_they_apply_to_one_test_only(self):
        class Another(Codes):
            def setUp(self):
                super().setUp()
                of = self.rank_1_exits_3
                self.skip_return_code_checks.append(getattr(of, "__wrapped__", of))

        self.assertEqual(outcome_of(Another("rank_1_exits_3")).outcome, "passed")
        self.assertEqual(outcome_of(Another("all_exit_3")).outcome, "error")


class TestProcesses(TestCase):
    def start(self, method):
        test = Things(method)
        test.setUp()
        self.addCleanup(test.doCleanups)
        return test

    def test_interface_of_multiprocessing(self):
        test = self.start("pauses")
        first, second = test.processes
        self.assertEqual([process.rank for process in test.processes], [0, 1])
        self.assertEqual([process.name for process in test.processes], ["process 0", "process 1"])
        self.assertNotEqual(first.pid, second.pid)
        for process in test.processes:
            os.kill(process.pid, 0)
            self.assertTrue(process.is_alive())
            self.assertIsNone(process.exitcode)
        first.join(timeout=0.01)
        self.assertTrue(first.is_alive())

        first.terminate()
        first.join()
        self.assertEqual((first.is_alive(), first.exitcode), (False, -signal.SIGTERM))
        self.assertTrue(second.is_alive())
        second.kill()
        second.join(timeout=60)
        self.assertEqual((second.is_alive(), second.exitcode), (False, -signal.SIGKILL))

    def test_a_killed_one_fails_the_test(self):
        test = self.start("pauses")
        test.processes[1].kill()
        with self.assertRaisesRegex(RankError, "rank 1 of 2 was killed by SIGKILL"):
            test.pauses()

    def test_exit_codes(self):
        test = self.start("fails")
        for process in test.processes:
            process.join()
        self.assertEqual(
            [process.exitcode for process in test.processes], [0, MultiProcessTestCase.TEST_ERROR_EXIT_CODE]
        )

    def test_nothing_is_left(self):
        for end in ("tearDown", "doCleanups"):
            with self.subTest(end=end), files_not_kept():
                test = self.start("pauses")
                pids = [process.pid for process in test.processes]
                directory = os.path.dirname(test.file_name)
                self.assertTrue(os.path.isdir(directory))
                getattr(test, end)()
                self.assertFalse(os.path.exists(directory))
                self.assertEqual(test.processes, [])
                for pid in pids:
                    with self.assertRaises(ProcessLookupError):
                        os.kill(pid, 0)

    def test_set_up_that_fails_after_the_start(self):
        pids = []

        class Broken(Things):
            def setUp(self):
                super().setUp()
                pids.extend(process.pid for process in self.processes)
                raise OSError("no")

        self.assertEqual(outcome_of(Broken("pauses")).outcome, "error")
        self.assertEqual(len(pids), 2)
        for pid in pids:
            with self.assertRaises(ProcessLookupError):
                os.kill(pid, 0)

    def test_logs_are_kept_on_request(self):
        class Talks(Ranks):
            def talks(self):
                print(f"here is {self.rank}")

        with tempfile.TemporaryDirectory() as logs, mock.patch.dict(os.environ, TORCH_TESTING_EXT_LOGS=logs):
            for _ in range(2):
                self.assertEqual(outcome_of(Talks("talks")).outcome, "passed")
            found = sorted(path.read_text() for path in Path(logs).glob("*/rank*.log"))
        self.assertEqual(found, ["here is 0\n", "here is 0\n", "here is 1\n", "here is 1\n"])


class TestTimeout(TestCase):
    def test_by_the_last_part_of_the_id(self):
        with mock.patch.dict(ranked_test_case.TIMEOUT_OVERRIDE, test_slow=7.0):
            self.assertEqual(get_timeout("file.Class.test_slow"), 7.0)
            self.assertEqual(get_timeout("test_slow"), 7.0)
            self.assertEqual(get_timeout("test_slow.other"), ranked_test_case.TIMEOUT_DEFAULT)

    def test_the_test_is_ended(self):
        with mock.patch.dict(ranked_test_case.TIMEOUT_OVERRIDE, pauses=0.3):
            seen = outcome_of(Things("pauses"))
        self.assertEqual(seen.outcome, "error")
        self.assertRegex(seen.message, r"timed out after \d+\.\d s; all 2 ranks still running")
        self.assertIn("in pauses (threading.Event().wait())", seen.message)

    def test_a_sleep_interrupted_by_the_stack_request_is_no_pass(self):
        with mock.patch.dict(ranked_test_case.TIMEOUT_OVERRIDE, pauses_until_a_signal=0.3):
            seen = outcome_of(Things("pauses_until_a_signal"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn("timed out", seen.message)


class TestClasses(TestCase):
    """The ranks run the same class object as the parent, wherever and whenever it was created."""

    def test_made_in_a_function(self):
        secret = os.getpid()

        class Local(Ranks):
            def tells(self):
                self.tell(secret)

        self.assertEqual(ranks_told(Local("tells")), [secret, secret])

    def test_of_the_same_name(self):
        """Each is created when the fork server is running already."""

        def make(value):
            class Same(Ranks):
                def tells(self):
                    self.tell(value)

            return Same

        outcome_of(Things("passes"))
        first, second = make(1), make(2)
        self.assertEqual([ranks_told(kind("tells"))[0] for kind in (first, second, first)], [1, 2, 1])

    def test_redefined_in_its_module(self):
        told = []
        for value in (1, 2):
            source = f"class Redefined(Ranks):\n    def tells(self):\n        self.tell({value})\n"
            exec(source, globals())
            self.addCleanup(globals().pop, "Redefined", None)
            told.append(ranks_told(globals()["Redefined"]("tells"))[0])
        self.assertEqual(told, [1, 2])

    def test_made_by_type(self):
        kind = type("Made", (Things,), {"tells": lambda self: self.tell("made")})
        self.assertEqual(ranks_told(kind("tells")), ["made", "made"])


if __name__ == "__main__":
    run_tests()
