"""`python test_file.py`: the tests that run, the output and the exit code."""

import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
import unittest
from pathlib import Path
from unittest import mock

import pytest
from kit.files import subject
from kit.processes import run_python

from torch_testing_ext._testing.bases import run_tests as run_tests_module
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

SCRIPT = subject(__file__, "run_tests_script.py")


class ScriptTestCase(TestCase):
    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.script = Path(directory.name) / "test_script.py"
        self.write(SCRIPT)

    def write(self, text):
        self.script.write_text(textwrap.dedent(text))

    def run_script(self, *arguments, **environment):
        """Run the script in a fork of this process, which has imported torch already."""
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                self.become_script(arguments, environment, stdout, stderr)
            _, status = os.waitpid(pid, 0)
            texts = [self.read(file) for file in (stdout, stderr)]
        return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(status), *texts)

    def become_script(self, arguments, environment, stdout, stderr):
        code = 1
        try:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
            os.environ.update(environment, PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = [str(self.script), *arguments]
            runpy.run_path(str(self.script), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(ValueError):  # closed by a test
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    @staticmethod
    def read(file):
        file.seek(0)
        return file.read()

    def run_interpreter(self, *arguments):
        return run_python(self.script, *arguments)


class TestOutcomes(ScriptTestCase):
    def test_success(self):
        done = self.run_script("-v")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("test_fine_x_2 (__main__.TestGood", done.stderr)
        self.assertIn("Ran 7 tests", done.stderr)
        self.assertTrue(done.stderr.rstrip().endswith("OK (skipped=2)"), done.stderr)

    def test_failure(self):
        done = self.run_script(BAD="1")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("FAIL: test_fails", done.stderr)
        self.assertIn("Scalars are not equal!", done.stderr)
        self.assertIn("last", done.stdout)

    def test_ctrl_c_ends_the_tests_and_still_reports(self):
        done = self.run_script("TestBad", "TestZLast", BAD="1", INTERRUPT="1")
        self.assertEqual(done.returncode, 130, done.stderr)
        self.assertIn("Scalars are not equal!", done.stderr)
        self.assertIn("Interrupted: the tests that follow were not run.", done.stderr)
        self.assertIn("Ran 2 tests", done.stderr)
        self.assertNotIn("last", done.stdout)
        self.assertNotIn("KeyboardInterrupt", done.stderr)

    def test_no_test_at_all(self):
        self.write("from torch_testing_ext.common_utils import run_tests\nrun_tests()")
        done = self.run_script()
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertIn("No test was found, so nothing was tested", done.stderr)

    def test_no_test_matches(self):
        for arguments in (["-k", "nothing_like_it"], ["-k", "nothing_like_it", "--subprocess"]):
            done = self.run_script(*arguments)
            self.assertEqual(done.returncode, 5, done.stderr)
            self.assertIn("No test was found", done.stderr)

    def test_skipping_all_tests_is_a_success(self):
        self.assertEqual(self.run_script("TestBad").returncode, 0)

    def test_an_error_before_the_first_test_is_an_error(self):
        self.write("""
            from torch_testing_ext.common_utils import TestCase, run_tests
            class Case(TestCase):
                @classmethod
                def setUpClass(cls):
                    raise ValueError("broken")
                def test_it(self):
                    pass
            run_tests()
        """)
        done = self.run_script()
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("ValueError: broken", done.stderr)


ENDS = subject(__file__, "run_tests_ends.py")


@pytest.mark.slow
class TestLeftOut(ScriptTestCase):
    """Tests that unittest does not run are no part of an OK."""

    SCRIPT = subject(__file__, "run_tests_left_out.py")

    def test_tests_for_pytest_only(self):
        self.write(self.SCRIPT)
        done = self.run_script()
        self.assertEqual(done.returncode, 1)
        self.assertIn("ERROR: test_bad\n", done.stderr)
        self.assertIn("ERROR: TestPlain.test_bad_too\n", done.stderr)
        self.assertRegex(
            done.stderr, r"test_bad is a function: unittest does not run it. pytest does: python .*--use-py"
        )
        self.assertIn("\nFAILED (errors=2)", done.stderr)
        self.assertNotIn("test_excluded", done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        for arguments, code in (
            (("CaseTest",), 0),
            (("CaseTest.test_good",), 0),
            (("-k", "good"), 0),
            (("-k", "bad"), 1),
            (("-k", "bad_too"), 1),
            (("--subprocess",), 1),
        ):
            with self.subTest(arguments=arguments):
                done = self.run_script(*arguments)
                self.assertEqual(done.returncode, code, done.stderr)
                named = "test_bad is a function" in done.stderr
                self.assertEqual(named, arguments in (("-k", "bad"), ("--subprocess",)), done.stderr)


class TestEarlyEnds(ScriptTestCase):
    """Whatever ends the process early: its exit code is not that of a success, and it says what was running."""

    def setUp(self):
        super().setUp()
        self.write(ENDS)

    def test_os_exit(self):
        for where, name in (
            ("test_a", "First.test_a"),
            ("setUpClass", "setUpClass (__main__.First)"),
            ("tearDownClass", "tearDownClass (__main__.First)"),
            ("class cleanup", "tearDownClass (__main__.First)"),
            ("setUpModule", "setUpModule (__main__)"),
            ("tearDownModule", "tearDownModule (__main__)"),
            ("module cleanup", "tearDownModule (__main__)"),
        ):
            with self.subTest(where=where):
                done = self.run_script("exit", where)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn("os._exit() ended the tests before they were over", done.stderr)
                self.assertIn(name, done.stderr)
                self.assertIn("in end\n", done.stderr)

    def test_a_rank_of_a_launcher_that_cannot_go_on(self):
        """It has said why, and the user has not called os._exit()."""
        self.write(
            "import unittest\nfrom torch_testing_ext.common_utils import run_tests\n"
            "from torch_testing_ext.launch import Launched\n"
            "class T(unittest.TestCase):\n"
            "    def test_a(self): Launched(0, 2, True, 0, '').abandon('this is why')\n"
            "run_tests()\n"
        )
        done = self.run_script()
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.strip(), "this is why")

    def test_another_program(self):
        done = self.run_script("become", "tearDownClass")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("os.execv", done.stderr)

    def test_sys_exit(self):
        for where in ("test_a", "setUpClass", "tearDownClass", "class cleanup", "setUpModule", "tearDownModule"):
            with self.subTest(where=where):
                done = self.run_script("leave", where)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn("SystemExit: 0", done.stderr)
                self.assertIn("FAILED (errors=1)", done.stderr)
                self.assertEqual("Ran 2 tests" in done.stderr, "setUp" not in where, done.stderr)

    def test_sys_exit_in_a_suite_of_its_own(self):
        self.write(
            ENDS.replace("if __name__", "def load_tests(*_): return unittest.TestSuite([First('test_a')])\nif __name__")
        )
        for where in ("setUpClass", "tearDownClass"):
            done = self.run_script("leave", where)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("the tests that follow were not run", done.stderr)

    @pytest.mark.slow
    def test_at_exit(self):
        done = self.run_interpreter("exit", "atexit")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("FAILED (failures=1)", done.stderr)

    def test_a_child_may_exit(self):
        done = self.run_script("exit", "child")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("os._exit()", done.stderr)

    @pytest.mark.slow
    def test_each_in_a_process_of_its_own(self):
        """Also where SIGCHLD is ignored, and exit codes of children are lost."""
        source = ENDS.replace("WHERE, HOW = sys.argv.pop(), sys.argv.pop()", "WHERE, HOW = 'test_a', 'exit'")
        self.write(f"import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n{source}")
        done = self.run_script("--subprocess")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("Ran 2 tests, each in a process of its own: 1 failed.", done.stderr)


@pytest.mark.slow
class TestStreams(ScriptTestCase):
    def test_a_test_may_leave_broken_streams(self):
        for run, source in (
            (self.run_script, "sys.stdout.close(), sys.stderr.close()"),
            (self.run_script, "setattr(sys, 'stdout', None), setattr(sys, 'stderr', None)"),
            # Python flushes them when it exits.
            (self.run_interpreter, "setattr(sys, 'stdout', object()), setattr(sys, 'stderr', object())"),
        ):
            self.write(f"""
                import sys
                from torch_testing_ext.common_utils import TestCase, run_tests
                class Case(TestCase):
                    def test_a(self): {source}
                    def test_b(self): pass
                    def test_c(self): self.assertEqual(len(sys.argv), 1)
                if __name__ == "__main__": run_tests()
            """)
            with self.subTest(source=source):
                done = run()
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("Ran 3 tests", done.stderr)


@instantiate_parametrized_tests
class TestOptions(ScriptTestCase):
    def test_help_explains_both(self):
        done = self.run_script("--help")
        self.assertEqual(done.returncode, 0, done.stderr)
        for text in ("--seed", "--subprocess", "run all tests N times", "-k TESTNAMEPATTERNS", "--failfast"):
            self.assertIn(text, done.stdout)

    def test_selection(self):
        done = self.run_script("-v", "-k", "fine")
        self.assertIn("Ran 2 tests", done.stderr)
        done = self.run_script("TestGood.test_fine_x_1")
        self.assertIn("Ran 1 test", done.stderr)

    def test_seed(self):
        first, second, other = (self.run_script("-k", "random", f"--seed={seed}").stdout for seed in (7, 7, 8))
        self.assertIn("random", first)
        self.assertEqual(first, second)
        self.assertNotEqual(first, other)

    def test_repeat(self):
        done = self.run_script("-k", "last", "--repeat", "3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("last"), 3)

    def test_repeat_ends_with_the_first_failure(self):
        done = self.run_script("-k", "test_fails", "--repeat", "3", BAD="1")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.count("FAIL: test_fails"), 1)

    @pytest.mark.slow
    def test_subprocess(self):
        done = self.run_script("--subprocess", "-k", "fine_x_1", "-k", "test_fails", "-v", BAD="1")
        self.assertEqual(done.returncode, 1, done.stderr)
        pids = {line.split()[-1] for line in done.stdout.splitlines() if line.startswith(("fine", "bad"))}
        self.assertEqual(len(pids), 2)
        self.assertIn("failed: TestBad.test_fails; to run it alone: ", done.stderr)
        self.assertIn("Ran 2 tests, each in a process of its own: 1 failed.", done.stderr)

    def test_discover_tests_runs_none(self):
        done = self.run_script("--discover-tests", "-k", "TestGood")
        self.assertEqual(done.returncode, 0, done.stderr)
        names = ["fine_x_1", "fine_x_2", "random", "text"]
        self.assertEqual(done.stdout.split(), [f"TestGood.test_{name}" for name in names])

    def test_accept_rewrites_the_literal(self):
        done = self.run_script("TestGood.test_text", "--accept")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('"""new"""', self.script.read_text())
        self.assertNotIn("'''old'''", self.script.read_text())

    def test_showlocals(self):
        self.assertIn("a local variable", self.run_script("--showlocals", "-k", "test_fails", BAD="1").stderr)

    def test_use_pytest(self):
        done = self.run_script("--use-pytest", "-k", "fine", "-q")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("2 passed", done.stdout)

    @parametrize(
        "arguments",
        [["--save-xml"], ["--save-xml=reports"], ["--run-parallel=2"], ["--import-disabled-tests"], ["--log-suffix=x"]],
        name_fn=lambda arguments: "".join(filter(str.isalpha, arguments[0])),
    )
    def test_options_without_effect_say_so(self, arguments):
        done = self.run_script(*arguments, "-k", "last")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"{arguments[0].split('=')[0]} has no effect: ", done.stderr)
        self.assertIn("Ran 1 test", done.stderr)

    def test_unknown_options_are_a_usage_error(self):
        done = self.run_script("--no-such-option")
        self.assertEqual(done.returncode, 2)
        self.assertIn("unrecognized arguments: --no-such-option", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_an_unknown_test_is_an_error(self):
        self.assertEqual(self.run_script("TestGood.test_missing").returncode, 1)

    def test_arguments_may_be_given_by_the_caller(self):
        self.write(SCRIPT.replace("    run_tests()", "    run_tests([sys.argv[0], '-k', 'last'])"))
        self.assertIn("Ran 1 test", self.run_script("--no-such-option").stderr)


class StreamTest(TestCase):
    def test_a_run_closes_the_stream_that_it_has_opened(self):
        stream = io.StringIO()
        with mock.patch.object(run_tests_module, "_own_stderr", return_value=stream):
            runner = run_tests_module._Runner()
        with mock.patch.object(run_tests_module._Runner, "guard", mock.Mock(), create=True):
            runner.run(unittest.TestSuite())
        self.assertTrue(stream.closed)


if __name__ == "__main__":
    run_tests()
