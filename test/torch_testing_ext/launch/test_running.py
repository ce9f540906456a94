"""Tests the output and exit code of a test file that is run as a script, as a module, by pytest, and with settings."""

import os
import pty
import re
import select
import shlex
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from kit.files import subject, write
from kit.processes import ROOT
from kit.warm import run_warm

from torch_testing_ext.common_utils import TestCase, run_tests

FILE = subject(__file__, "running_tests.py")


class RunningTest(TestCase):
    def setUp(self):
        super().setUp()
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.directory = Path(temporary.name)
        self.file = write(self.directory, "test_it.py", FILE)

    def run_python(self, *arguments, code=0, cwd=".", **environment):
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        done = run_warm(*arguments, cwd=self.directory / cwd, env=environ, timeout=120, together=True)
        self.assertEqual(done.returncode, code, done.stdout)
        return done.stdout

    def run_all(self, *runs):
        """What these runs return. Two run at once: most of their time is one core's, for importing torch."""
        with ThreadPoolExecutor(2) as two_at_once:
            return list(two_at_once.map(lambda run: run(), runs))

    def insert_line(self, line):
        self.file.write_text(self.file.read_text().replace("# more at import", line))

    def test_a_pass_imports_nothing_that_explains_failures(self):
        names = ("hang", "judging", "persistent_ranks")
        known = [f"torch_testing_ext.launch.{name}" for name in names]
        said = f'print("imported:", *[name for name in {known} if name in sys.modules], file=sys.stderr)'
        self.insert_line(f"import atexit; atexit.register(lambda: {said})")
        passed, failed = self.run_all(
            lambda: self.run_python("test_it.py", "TestIt.test_passes"),
            lambda: self.run_python("test_it.py", "TestIt.test_fails_in_rank_1", code=1),
        )
        self.assertIn("imported:\n", passed)
        self.assertIn(f"imported: {' '.join(known[:2])}\n", failed)

    # -- ways to start

    def test_as_a_file(self):
        self.assertIn("Ran 1 test", self.run_python("test_it.py", "TestIt.test_passes"))

    @pytest.mark.slow
    def test_from_another_directory(self):
        (self.directory / "elsewhere").mkdir()
        self.assertIn("Ran 1 test", self.run_python(str(self.file), "-k", "passes", cwd="elsewhere"))

    def test_as_a_module(self):
        self.assertIn("Ran 1 test", self.run_python("-m", "unittest", "test_it.TestIt.test_passes"))

    @pytest.mark.slow
    def test_in_a_package(self):
        write(self.directory, "package/__init__.py", "")
        write(self.directory, "package/inner/__init__.py", "")
        write(self.directory, "package/inner/helper.py", "value = 1")
        write(self.directory, "package/inner/test_it.py", FILE.replace("# more at import", "from .helper import value"))
        self.run_all(
            lambda: self.run_python("-m", "unittest", "package.inner.test_it.TestIt.test_passes"),
            lambda: self.run_python(
                "-m", "unittest", "package.inner.test_it.TestIt.test_passes", TORCH_TESTING_EXT_START="spawn"
            ),
            lambda: self.run_python("-m", "package.inner.test_it", "TestIt.test_passes"),
        )

    @pytest.mark.slow
    def test_spawned(self):
        """Of a file; `test_in_a_package` has those of a module."""
        self.run_python("test_it.py", "TestIt.test_passes", TORCH_TESTING_EXT_START="spawn")

    @pytest.mark.slow
    @unittest.skipUnless(find_spec("pytest"), "pytest is not installed")
    def test_under_pytest(self):
        passed, printed = self.run_all(
            lambda: self.run_python("-m", "pytest", "-q", "test_it.py", "-k", "passes"),
            lambda: self.run_python("-m", "pytest", "-q", "test_it.py", "-k", "fails", code=1),
        )
        self.assertIn("1 passed", passed)
        self.assertIn("rank 1 of 2 raised", printed)
        self.assertIn("python -m pytest test_it.py::TestIt::test_fails_in_rank_1", printed)

    @pytest.mark.slow
    @unittest.skipUnless(find_spec("xdist"), "pytest-xdist is not installed")
    def test_under_xdist(self):
        """Its workers have a second thread: the ranks are forked from a new interpreter."""
        printed = self.run_python("-m", "pytest", "-q", "-n", "2", "test_it.py", "-k", "passes or fails", code=1)
        self.assertIn("1 failed, 1 passed", printed)
        self.assertIn("rank 1 of 2 raised", printed)

    def test_the_command_given_runs_just_this_test(self):
        printed = self.run_python("test_it.py", code=1)
        command = re.search(r"run again:  (python .*fails.*)", printed).group(1)
        arguments = shlex.split(command)[1:]
        second = self.run_python(*arguments, code=1)
        self.assertIn("Ran 1 test", second)
        self.assertIn("on purpose", second)

    # -- modules that start threads, query accelerators or fail when they are imported

    @pytest.mark.slow
    def test_thread_at_import(self):
        """Every interpreter that imports the module has the thread: ranks are spawned, with one warning."""
        self.insert_line("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()")
        printed = self.run_python("test_it.py", "TestIt.test_passes", "TestIt.test_passes")
        self.assertIn("Ran 2 tests", printed)
        self.assertEqual(printed.count("ranks are started as new interpreters"), 1, printed)
        self.assertIn("it runs other threads (Thread-1", printed)

    @pytest.mark.slow
    def test_thread_at_import_and_forced_fork(self):
        self.insert_line("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()")
        printed = self.run_python("test_it.py", "TestIt.test_passes", code=1, TORCH_TESTING_EXT_START="fork")
        self.assertIn("TORCH_TESTING_EXT_START=fork, but ranks cannot be forked", printed)

    def test_accelerator_queried_at_import(self):
        self.insert_line("torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.is_available()")
        self.run_python("test_it.py", "TestIt.test_passes")

    def test_a_module_that_cannot_be_imported(self):
        self.insert_line("import no_such_module")
        for printed in self.run_all(
            lambda: self.run_python("test_it.py", code=1),
            lambda: self.run_python("-m", "unittest", "test_it", code=1),
        ):
            self.assertIn("No module named 'no_such_module'", printed)

    @pytest.mark.slow
    def test_a_module_that_only_the_main_process_can_import(self):
        """Ranks that are new interpreters report the error, each with its own traceback."""
        self.insert_line("assert os.environ.setdefault('MAIN', str(os.getpid())) == str(os.getpid()), 'not the main'")
        printed = self.run_python("test_it.py", "TestIt.test_passes", code=1, TORCH_TESTING_EXT_START="spawn")
        self.assertIn("AssertionError: not the main", printed)

    # -- settings

    def test_a_setting_that_does_not_exist(self):
        name, value = self.run_all(
            lambda: self.run_python("test_it.py", "TestIt.test_passes", code=1, TORCH_TESTING_EXT_STRAT="fork"),
            lambda: self.run_python("test_it.py", "TestIt.test_passes", code=1, TORCH_TESTING_EXT_START="vfork"),
        )
        for printed in (name, value):
            self.assertIn("Ran 1 test", printed)
        self.assertIn(
            "TORCH_TESTING_EXT_STRAT is not a variable of torch_testing_ext. Did you mean: TORCH_TESTING_EXT_START",
            name,
        )
        self.assertIn("'vfork' is not valid; use auto, fork, fork-fresh or spawn", value)

    def test_logs_are_kept(self):
        logs = self.directory / "logs"
        self.run_python("test_it.py", "TestIt.test_fails_in_rank_1", code=1, TORCH_TESTING_EXT_LOGS=str(logs))
        (kept,) = logs.iterdir()
        self.assertEqual(kept.name, "__main__.TestIt.test_fails_in_rank_1")
        for rank in (0, 1):
            self.assertIn(f"rank {rank} was here", (kept / f"rank{rank}.log").read_text())
        self.run_python("test_it.py", "TestIt.test_fails_in_rank_1", code=1, TORCH_TESTING_EXT_LOGS=str(logs))
        self.assertEqual(len(list(logs.iterdir())), 2)

    def test_only_the_culprits_output_is_shown(self):
        printed = self.run_python("test_it.py", "TestIt.test_fails_in_rank_1", code=1)
        self.assertIn("rank 1 was here", printed)
        self.assertNotIn("rank 0 was here", printed)

    def test_output_is_streamed(self):
        printed = self.run_python("test_it.py", "TestIt.test_fails_in_rank_1", code=1, TORCH_TESTING_EXT_STREAM="1")
        for rank in (0, 1):
            self.assertIn(f"[rank{rank}] rank {rank} was here\n", printed)
            self.assertIn(f"[rank{rank}] and here\n", printed)
        self.assertIn("  printed: rank 1 was here", printed)

    @pytest.mark.slow
    def test_debugging_one_rank(self):
        """Rank 1 has the terminal: it shows a prompt, reads input, and no time-out ends it."""
        with Terminal(self.directory, "test_it.py", "TestIt.test_breakpoint") as terminal:
            terminal.wait_for("(Pdb)")
            terminal.type("p 'answer is', answer\n")
            terminal.wait_for("('answer is', 43)")
            # Longer than the time-out, which is disabled.
            terminal.type("p 'slept', __import__('time').sleep(1.5)\n")
            terminal.wait_for("('slept', None)")
            terminal.type("continue\n")
            terminal.wait_for("OK")
        self.assertEqual(terminal.code, 0, terminal.seen)


class Terminal:
    """Runs a test file on a pseudo-terminal and types into it."""

    def __init__(self, directory, *arguments):
        self.seen = ""
        self.ours, theirs = pty.openpty()
        self.main = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=directory,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TORCH_TESTING_EXT_DEBUG_RANK": "1",
                "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "1",
                "TERM": "dumb",
            },
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        try:
            self.code = self.main.wait(timeout=30)
        finally:
            self.main.kill()
            self.main.wait()
            os.close(self.ours)

    def type(self, text):
        os.write(self.ours, text.encode())

    def wait_for(self, text):
        start = len(self.seen)
        while text not in self.seen[start:]:
            if not select.select([self.ours], [], [], 60)[0]:
                raise AssertionError(f"{text!r} did not appear:\n{self.seen}")
            try:
                self.seen += os.read(self.ours, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended before {text!r} appeared:\n{self.seen}") from None


if __name__ == "__main__":
    run_tests()
