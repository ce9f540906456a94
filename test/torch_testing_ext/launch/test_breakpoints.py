"""`breakpoint()` in ranks, on a real pseudo-terminal: what the user sees and types."""

import contextlib
import os
import re
import select
import subprocess
import sys
import unittest
from unittest import mock

import pytest
from kit.files import FolderCase, subject
from kit.processes import clean_environ, end
from kit.warm import run_warm

from torch_testing_ext._process import terminal as user_terminal
from torch_testing_ext._process.terminal import TERMINAL_VARIABLE, UserTerminal
from torch_testing_ext.runner import aspects_of_run
from torch_testing_ext.runner.options import UsageError
from torch_testing_ext.runner.options.sources import read_options

TESTS = subject(__file__, "breakpoints.py")
RUN_TEST = """
import sys
from pathlib import Path
from torch_testing_ext.runner.cli import main
sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent))
"""


class OnATerminalTest(FolderCase):
    def setUp(self):
        super().setUp()
        self.write("test_it.py", TESTS)
        self.write("run_test.py", RUN_TEST)

    def session(self, words, steps, too_early=r"\Z(?!)", **environ):
        """Run a program; for each step, wait for its prompt, and type its answer. Returns the code and all output.

        Where the text before a prompt matches `too_early`, it goes back by `c`, and begins again.
        """
        master, slave = os.openpty()
        self.addCleanup(os.close, master)
        command = [sys.executable, *words]
        # On a terminal, unittest is coloured since Python 3.14.
        environ = clean_environ(PYTHON_COLORS="0", **environ)
        program = subprocess.Popen(command, cwd=self.root, env=environ, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.addCleanup(end, program)
        said, seen, number = "", 0, 0
        while True:
            prompt, answer = steps[number] if number < len(steps) else (r"\Z(?!)", "")
            while not (found := re.search(prompt, said[seen:])):
                ready, _, _ = select.select([master], [], [], 120)
                self.assertTrue(ready, f"no {prompt!r} in {said}")
                try:
                    said += os.read(master, 1 << 16).decode(errors="replace")
                except OSError:  # the last process that had the terminal has ended
                    if answer:
                        self.fail(f"no {prompt!r} in {said}")
                    return program.wait(120), said.replace("\r\n", "\n")
            is_early = re.search(too_early, said[seen : seen + found.end()])
            seen += found.end()
            os.write(master, b"c\n" if is_early else f"{answer}\n".encode())
            number = 0 if is_early else number + 1

    def test_python(self):
        """A rank has the terminal, the others and the time limit wait, and the user changes the rank."""
        first, third = r"\(rank 1\) \Z", r"\(rank 2\) \Z"
        code, said = self.session(
            ["test_it.py", "StopTest.test_it"],
            [
                (r"\(rank [12]\) \Z", "rank 1"),  # either may be the first to stop
                (first, "p secret"),
                (first, "import time; time.sleep(3)"),  # longer than the test may take
                (first, "rank 0"),
                (r"\(rank 0\) \Z", "p self.rank + 70"),
                (r"\(rank 0\) \Z", "w"),
                (r"\(rank 0\) \Z", "c"),
                (r"\(rank [12]\) \Z", "rank 2"),
                (third, "rank 7"),
                (third, "p secret"),
                (third, "c"),
                (first, "n"),
                (first, "c"),
            ],
            too_early="rank 1 has not stopped",
            DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="2",
        )
        self.assertEqual(code, 0, said)
        for text in (
            "Other ranks and all timeouts are paused. Type `rank ",
            "'the secret of 1'",
            "rank 0 has not stopped: this is where it is.",
            "(rank 0) p self.rank + 70\n70\n",
            "test_it()\n-> dist.all_reduce(torch.ones(2))",
            "*** rank N, where N is one of 0, 1, 2; this is rank 2",
            "'the secret of 2'",
            "\nOK\n",
        ):
            self.assertIn(text, said)
        self.assertNotIn("fork_server", said)

    @pytest.mark.slow
    def test_a_failure_under_the_runner(self):
        prompt = r"\(rank 1\) \Z"
        code, said = self.session(
            ["run_test.py", "--pdb", "-otests=.", "-k", "test_fails"],
            [(prompt, "u"), (prompt, "p value"), (prompt, "q")],
        )
        self.assertEqual(code, 1, said)
        self.assertRegex(said, r"AssertionError: (.|\n)*\(rank 1\) p value\n41\n")
        self.assertIn("0 passed, 1 failed, 0 skipped", said)

    @pytest.mark.slow
    def test_the_first_line_of_a_test_for_pytest(self):
        prompt = r"\(rank 1\) \Z"
        code, said = self.session(
            ["run_test.py", "--trace=1", "test_it.py::test_marked"],
            [(prompt, "p dist_env.rank"), (prompt, "c"), (prompt, "c")],
        )
        self.assertEqual(code, 0, said)
        self.assertRegex(said, r"test_marked\(\)\n-> if dist_env.rank == 1:\n\(rank 1\) p dist_env.rank\n1\n")


class WithoutATerminalTest(FolderCase):
    @pytest.mark.slow
    def test_one_sentence_says_how(self):
        self.write("test_it.py", TESTS)
        self.write("run_test.py", RUN_TEST)
        for words, how in (
            (["-m", "pytest", "-q", "test_it.py::test_marked"], "there is no terminal: run the test in one"),
            (["run_test.py", "test_it.py::test_marked"], "python run_test.py --pdb test_it.py::test_marked"),
        ):
            with self.subTest(words=words):
                done = run_warm(*words, cwd=self.root, env=clean_environ())
                self.assertEqual(done.returncode, 1, done.stdout)
                self.assertRegex(done.stdout, rf"breakpoint\(\) in rank 1 of 2 cannot stop: .*{re.escape(how)}")
                self.assertNotIn("BdbQuit", done.stdout)

    @contextlib.contextmanager
    def stdin(self, fd):
        """Another standard input, as it would be at the start of this process."""
        before = os.dup(0)
        os.dup2(fd, 0)
        try:
            with mock.patch.object(user_terminal, "_at_start", user_terminal._of_stdin()):
                yield
        finally:
            os.dup2(before, 0)
            os.close(before)

    def test_options(self):
        def options(*argv, **environ):
            return read_options(argv, environ, self.root, self.root).options

        with open(os.devnull) as nothing, self.stdin(nothing.fileno()), mock.patch.dict(os.environ):
            for name in ("PYTEST_XDIST_WORKER", TERMINAL_VARIABLE):
                os.environ.pop(name, None)
            for argv, environ in ((("--pdb",), {}), ((), {"TORCH_TESTING_EXT_DEBUG_RANK": "1"})):
                with self.assertRaisesRegex(UsageError, "--pdb cannot stop: there is no terminal"):
                    aspects_of_run.require(options(*argv, **environ))
        master, terminal = os.openpty()
        self.addCleanup(os.close, master)
        self.addCleanup(os.close, terminal)
        path = os.ttyname(terminal)
        with self.stdin(terminal), mock.patch.dict(os.environ):
            for name in ("PYTEST_XDIST_WORKER", TERMINAL_VARIABLE):
                os.environ.pop(name, None)
            for argv, written in ((("--pdb",), f":{path}"), (("--trace=2", "x"), f"2:{path}")):
                chosen = options(*argv)
                self.assertEqual((chosen.pdb, chosen.jobs), (True, 1))
                self.assertEqual(aspects_of_run.variables(chosen, 0)[TERMINAL_VARIABLE], written)
            self.assertTrue(options(TORCH_TESTING_EXT_DEBUG_RANK="1").pdb)
            os.environ["PYTEST_XDIST_WORKER"] = "gw0"
            self.assertIn("without -n", UserTerminal.here().why_not)

    def test_settings_that_others_read(self):
        """They have the same effect under the runner, or are errors."""
        environ = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "8", "TORCH_TESTING_EXT_STREAM": "1"}
        found = read_options((), environ, self.root, self.root)
        self.assertEqual((found.options.timeout, found.options.stream), (8.0, True))
        self.assertEqual(found.sources["timeout"], "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT")
        self.assertEqual(read_options(("--timeout", "9"), environ, self.root, self.root).options.timeout, 9.0)
        with self.assertRaisesRegex(UsageError, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT: 'soon' is not a positive number"):
            read_options((), {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "soon"}, self.root, self.root)

    def test_the_value_of_the_setting(self):
        for terminal in (
            UserTerminal("/dev/pts/3", is_chosen=True),
            UserTerminal("/dev/pts/3", is_chosen=True, stop_in=0),
            UserTerminal(why_not="run it with a debugger: torchtest --pdb tests/test_x.py::T::test_y"),
        ):
            self.assertEqual(UserTerminal.read(terminal.written()), terminal)


if __name__ == "__main__":
    unittest.main()
