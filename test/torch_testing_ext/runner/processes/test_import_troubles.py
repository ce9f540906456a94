"""Test files that fail to import or that do unusual things at import: each is reported, and the others run."""

import os
import threading
from unittest import mock

from kit.processes import descendants
from kit.project import Project

from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.load_as import FilesFound
from torch_testing_ext.runner.processes.file_handle import FileHandle
from torch_testing_ext.runner.processes.file_processes import FileProcesses

FINE = "import unittest\nclass T(unittest.TestCase):\n    def test_fine(self): pass\n"


def setUpModule():
    global PROJECT
    PROJECT = Project()


def tearDownModule():
    PROJECT.close()


class TestEarly(TestCase):
    """Files that are imported while pytest says which ones it collects."""

    def test_one_that_is_collected_is_imported_once(self):
        log, goes_on = PROJECT.root / "imports", PROJECT.root / "goes_on"
        os.mkfifo(goes_on)
        early = PROJECT.write(f"open({str(log)!r}, 'a').write('once ')\nopen({str(goes_on)!r}).read()\n{FINE}")
        found = PROJECT.preloaded_server.find_files([early])
        self.assertIn(early, found.paths)
        let_go = threading.Thread(target=goes_on.write_text, args=("",))
        let_go.start()
        ran = PROJECT.run(early)
        let_go.join()
        self.assertEqual(ran.outcomes, {"test_fine": "passed"})
        self.assertEqual(log.read_text(), "once ")

    def test_one_that_is_not_is_ended(self):
        files = PROJECT.preloaded_server
        with mock.patch.object(FileProcesses, "_find_files", return_value=FilesFound(())):
            files.find_files([PROJECT.write("import time\ntime.sleep(1000)\n")])
        while files.children:  # for ever, if its process goes on
            files.loop.step()
        self.assertEqual(files.warnings, ())


class TestBroken(TestCase):
    def check(self, source, *said):
        """The broken file is one error; the other file runs."""
        broken, fine = PROJECT.write(source), PROJECT.write(FINE)
        ran = PROJECT.run(broken, fine)
        self.assertEqual(ran.outcomes, {broken: "error", "test_fine": "passed"})
        for text in said:
            self.assertIn(text, ran[broken].said)
        return ran[broken]

    def test_an_error_shows_the_traceback_from_the_test_file_on(self):
        attempt = self.check("print('hello')\nimport no_such_module\n", "No module named 'no_such_module'", "line 2")
        self.assertNotIn("importlib", attempt.said)
        self.assertIn("hello", attempt.output)

    def test_a_syntax_error(self):
        self.check("def f(:\n", "SyntaxError", "def f(:")

    def test_sys_exit(self):
        self.check("import sys\nsys.exit(3)\n", "called sys.exit(3) while it was imported")

    def test_a_death(self):
        self.check("import os\nos._exit(7)\n", "exited with code 7")
        self.check("import os\nos.kill(os.getpid(), 9)\n", "was killed by SIGKILL")

    def test_a_hanging_import_ends_with_all_processes_that_it_started(self):
        source = """
            import subprocess, time
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            time.sleep(1000)
        """
        before = descendants(os.getpid())
        after = EventLoop.after

        def after_less(loop, seconds, call):
            """Give up this file soon, and no other one: that may take as long on a busy machine."""
            file = getattr(call, "__self__", None)
            is_hanging = isinstance(file, FileHandle) and "time.sleep(1000)" in file.path.read_text()
            return after(loop, 0.3 if is_hanging else seconds, call)

        with mock.patch.object(EventLoop, "after", after_less):
            self.check(source, "took more than")
        left = descendants(os.getpid()) - before
        self.assertEqual([pid for pid in left if b"sleep" in _command(pid)], [])

    def test_a_missing_file(self):
        ran = PROJECT.run("test_nowhere.py")
        self.assertEqual(ran.outcomes, {"test_nowhere.py": "error"})
        self.assertIn("FileNotFoundError", ran["test_nowhere.py"].said)


class TestSkipped(TestCase):
    """A file that skips all of its tests is a skip, not an error."""

    def check(self, source, reason, want=None):
        skipped, fine = PROJECT.write(source), PROJECT.write(FINE)
        ran = PROJECT.run(skipped, fine)
        self.assertEqual(ran.outcomes, {skipped: "skipped", "test_fine": "passed"})
        self.assertEqual(ran[skipped].said, reason)
        self.assertEqual(ran[skipped].end.want, want)

    def test_by_unittest(self):
        self.check("import unittest\nraise unittest.SkipTest('not on this machine')\n", "not on this machine")
        self.check("import unittest\nraise unittest.SkipTest\n", "skipped")

    def test_by_a_module_that_it_imports(self):
        PROJECT.write("import unittest\nraise unittest.SkipTest('no GPU')\n", "needs_gpu.py")
        self.check("import needs_gpu\n", "no GPU")

    def test_by_a_function_that_knows_what_it_needs(self):
        self.check(
            "import unittest\nerror = unittest.SkipTest('too few')\nerror.want = '9 devices'\nraise error\n",
            "too few",
            "9 devices",
        )

    def test_by_pytest(self):
        self.check(
            "import pytest\npytest.importorskip('no_such_module')\n",
            "could not import 'no_such_module': No module named 'no_such_module'",
        )
        self.check("import pytest\npytest.skip('not now', allow_module_level=True)\n", "not now")

    def test_not_by_an_exception_that_it_handled(self):
        ran = PROJECT.run(
            PROJECT.write(
                "import unittest\ntry: raise unittest.SkipTest\nexcept unittest.SkipTest: raise LookupError\n"
            )
        )
        self.assertEqual(list(ran.outcomes.values()), ["error"])

    def test_not_by_a_skip_of_pytest_without_permission(self):
        """pytest calls that an error, too: the author may have meant to decorate a test."""
        ran = PROJECT.run(PROJECT.write("import pytest\npytest.skip('not now')\n"))
        self.assertEqual(list(ran.outcomes.values()), ["error"])

    def test_a_module_fixture(self):
        source = "import unittest\ndef setUpModule(): raise unittest.SkipTest('later')\n" + FINE
        ran = PROJECT.run(PROJECT.write(source))
        self.assertEqual(ran.outcomes, {"test_fine": "skipped"})
        self.assertEqual(ran["test_fine"].said, "later")

    def test_when_it_is_imported_again(self):
        """Its tests were listed: that they did not run is no skip."""
        file = PROJECT.write(
            """
            import os, unittest
            if os.path.exists("imported_once"): raise unittest.SkipTest("not twice")
            open("imported_once", "w").close()
            class T(unittest.TestCase):
                def test_a(self): pass
            """
        )
        PROJECT.preloaded_server.discover([file])
        PROJECT.preloaded_server.file(file).close()
        planned = PROJECT.preloaded_server.file(file).contents.tests
        self.assertEqual(len(planned), 1)
        ran = PROJECT.run_tests_of(planned)
        self.assertEqual(ran.outcomes, {"test_a": "error"})
        self.assertIn("it skips itself when it is imported again: not twice", ran["test_a"].said)


class TestUnusual(TestCase):
    def test_a_file_may_ignore_the_ends_of_children(self):
        """Or take their exit codes: the process that imports the file waits for a child that lists its tests."""
        takes = "lambda number, frame: [os.waitpid(-1, os.WNOHANG) for _ in range(3)]"
        for handler in "signal.SIG_IGN", takes:
            file = PROJECT.write(f"import os, signal\nsignal.signal(signal.SIGCHLD, {handler})\n{FINE}")
            self.assertEqual(PROJECT.run(file).outcomes, {"test_fine": "passed"})

    def test_a_file_that_starts_threads_runs_in_new_interpreters(self):
        file = PROJECT.write(
            """
            import os, threading, unittest
            threading.Thread(target=threading.Event().wait, daemon=True, name="helper").start()
            class T(unittest.TestCase):
                def test_has_the_thread(self): self.assertIn("helper", [each.name for each in threading.enumerate()])
                def test_dies(self): os._exit(3)
            """
        )
        discovery = PROJECT.preloaded_server.discover([file])
        self.assertEqual(len(discovery.warnings), 1)
        self.assertIn("it runs other threads (helper)", discovery.warnings[0])
        ran = PROJECT.run(file)
        self.assertEqual(ran.outcomes, {"test_has_the_thread": "passed", "test_dies": "crashed"})

    def test_the_listed_tests_are_the_tests_that_run(self):
        """Even if the file has different tests at each import."""
        file = PROJECT.write(
            """
            import os, unittest
            class T(unittest.TestCase): pass
            setattr(T, f"test_{os.getpid()}", lambda self: None)
            """
        )
        listed = {test.id.method for test in PROJECT.preloaded_server.discover([file]).tests}
        self.assertEqual(set(PROJECT.run(file).outcomes), listed)

    def test_a_test_that_is_missing_at_the_second_import_is_an_error(self):
        file = PROJECT.write(
            """
            import os, threading, unittest
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            class T(unittest.TestCase): pass
            setattr(T, f"test_{os.getpid()}", lambda self: None)
            """
        )
        ran = PROJECT.run(file)
        self.assertEqual(list(ran.outcomes.values()), ["error"])
        (attempts,) = ran.attempts.values()
        self.assertIn("was listed, but does not exist", attempts[0].said)

    def test_a_file_is_imported_as_if_run_from_its_folder(self):
        (PROJECT.root / "folder").mkdir()
        PROJECT.write("VALUE = 3\n", "folder/helper_beside.py")
        file = PROJECT.write(
            """
            import os, sys, unittest
            import helper_beside
            class T(unittest.TestCase):
                def test_it(self):
                    self.assertEqual(__name__, "test_beside")
                    self.assertEqual(sys.argv, [__file__])
                    self.assertEqual(sys.path[0], os.path.dirname(__file__))
                    self.assertEqual(sys.stdin.read(), "")
            """,
            "folder/test_beside.py",
        )
        self.assertEqual(PROJECT.run(file).outcomes, {"test_it": "passed"})


def _command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


if __name__ == "__main__":
    run_tests()
