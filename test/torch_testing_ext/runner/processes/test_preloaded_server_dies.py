"""A preloaded server that dies during a run, or cannot start again: every test has its result, and the others run."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from unittest import mock

import pytest
from kit.files import subject
from kit.project import Project

from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner import events
from torch_testing_ext.runner.engine import running_unit
from torch_testing_ext.runner.options import CannotRun
from torch_testing_ext.runner.processes import file_processes, preloaded_client

# Kills the preloaded server: the parent of the parent of the supervisor.
KILLERS = subject(__file__, "killers.py")
# A module that the preloaded server imports first: it ends the preloaded servers after the first one.
DIES_LATER = """
import os
if os.path.exists({marker!r}):
    print("no torch any more", flush=True)
    os._exit(7)
"""


class PreloadedServerCase(TestCase):
    def setUp(self):
        super().setUp()
        self.project = self.make_project()

    def make_project(self):
        project = Project()
        self.addCleanup(project.close)
        return project

    def kill_preloaded_server(self):
        while not self.project.preloaded_server._ready:
            self.project.preloaded_server.loop.step()
        os.kill(self.project.preloaded_server._process.pid, signal.SIGKILL)


@pytest.mark.slow
class KilledByTestsTest(PreloadedServerCase):
    def test_more_often_than_once_for_each_of_many_tests(self):
        source = KILLERS + "".join(
            f"    def test_{number}(self): self.kill_the_preloaded_server()\n" for number in range(5)
        )
        other = self.project.write("import unittest\nclass U(unittest.TestCase):\n    def test_other(self): pass\n")
        ran = self.project.run(self.project.write(source), other, jobs=1)
        self.assertEqual(
            ran.outcomes,
            {
                **{f"test_{number}": "crashed" for number in range(5)},
                "test_z_is_fine": "passed",
                "test_other": "passed",
            },
        )
        self.assertIn("was killed by SIGKILL", ran["test_4"].said)

    def test_without_end(self):
        """It is given up after so many deaths in a row: the rest fails by name, with the reason."""
        source = KILLERS + "".join(
            f"    def test_{number}(self): self.kill_the_preloaded_server()\n" for number in range(4)
        )
        with mock.patch.object(preloaded_client, "MOST_DEATHS", 2):
            ran = self.project.run(self.project.write(source), jobs=1, retries=1)
        self.assertEqual(len(ran.outcomes), 5)
        self.assertEqual(set(ran.outcomes.values()), {"error"})
        first = [each[0].outcome.value for each in ran.attempts.values()]
        self.assertEqual(sorted(first), ["crashed"] * 3 + ["error"] * 2)
        given_up = [each[-1].said for each in ran.attempts.values() if each[-1].outcome.value == "error"]
        for message in given_up:
            self.assertIn("it was not run: the process that imports torch for all tests was killed by SIGKILL", message)
            self.assertIn("3 times in a row", message)
        self.assertEqual(ran.summary.unfinished, ())

    def test_by_the_import_of_a_file(self):
        killer = KILLERS.partition("class")[0] + "os.kill(parent_of(os.getpid()), signal.SIGKILL)\nsignal.pause()\n"
        good = self.project.write("import unittest\nclass T(unittest.TestCase):\n    def test_it(self): pass\n")
        bad = self.project.write(killer)
        ran = self.project.run(good, bad)
        self.assertEqual(ran.outcomes, {"test_it": "passed", bad: "error"})
        self.assertRegex(ran[bad].said, "was killed by SIGKILL .*during the import")


@pytest.mark.slow
class WhileFilesAreImportedTest(PreloadedServerCase):
    def test_files_that_die_with_the_preloaded_server_are_imported_again(self):
        """The preloaded server dies as soon as two files are being imported: each waits until the other is, too."""
        marker, fifo = self.project.root / "marker", self.project.root / "fifo"
        os.mkfifo(fifo)
        once = f"if not os.path.exists({str(marker)!r}):\n    "
        kill = f"open({str(marker)!r}, 'w').close(); os.kill(parent_of(os.getpid()), signal.SIGKILL); signal.pause()\n"
        a = self.project.write(KILLERS + once + f"open({str(fifo)!r}).read(); " + kill)
        b = self.project.write(KILLERS.replace("z_is", "y_is") + once + f"open({str(fifo)!r}, 'w'); signal.pause()\n")
        ran = self.project.run(a, b)
        self.assertEqual(ran.outcomes, {"test_z_is_fine": "passed", "test_y_is_fine": "passed"})

    def test_files_that_skip_themselves_then(self):
        marker, fifo = self.project.root / "marker", self.project.root / "fifo"
        os.mkfifo(fifo)
        skip = f"if os.path.exists({str(marker)!r}): raise unittest.SkipTest('the second time')\n"
        kill = f"open({str(marker)!r}, 'w').close(); os.kill(parent_of(os.getpid()), signal.SIGKILL); signal.pause()\n"
        helpers = KILLERS.partition("class")[0] + skip
        a = self.project.write(helpers + f"open({str(fifo)!r}).read(); " + kill)
        b = self.project.write(helpers + f"open({str(fifo)!r}, 'w'); signal.pause()\n")
        self.assertEqual(self.project.run(a, b).outcomes, {a: "skipped", b: "skipped"})

    def test_a_file_that_cannot_be_imported_again_fails_all_its_tests(self):
        marker = self.project.root / "marker"
        file = self.project.write(
            f"""
            import os, unittest
            if os.path.exists({str(marker)!r}): raise RuntimeError("only once")
            class T(unittest.TestCase):
                def test_a(self): pass
                def test_b(self): pass
                def test_c(self): pass
            """
        )
        discovery = self.project.preloaded_server.discover([file])
        self.project.preloaded_server.file(file).close()
        marker.touch()
        with mock.patch.object(self.project.preloaded_server, "discover", return_value=discovery):
            ran = self.project.run(file, jobs=1, retries=1)
        self.assertEqual(ran.outcomes, dict.fromkeys(("test_a", "test_b", "test_c"), "error"))
        for name in ran.outcomes:
            self.assertRegex(ran[name].said, "(?s)could not be imported again: .*only once")


@pytest.mark.slow
class NotStartedAgainTest(TestCase):
    def setUp(self):
        super().setUp()
        root = self.folder()
        (root / "ends_it.py").write_text(DIES_LATER.format(marker=str(root / "marker")))
        self.project = Project(root, ["ends_it"])
        self.addCleanup(self.project.close)

    def folder(self):
        import tempfile
        from pathlib import Path

        return Path(tempfile.mkdtemp(prefix="torch_testing_ext_test_")).resolve()

    def test_what_cannot_run_fails_by_name(self):
        names = "bcdef"
        tests = "".join(f"    def test_{name}(self): pass\n" for name in names)
        file = self.project.write(KILLERS + "    def test_a(self): self.kill_the_preloaded_server()\n" + tests)

        def react(event):
            if isinstance(event, events.RunBegan):
                (self.project.root / "marker").touch()

        ran = self.project.run(file, react=react, jobs=1)
        self.assertEqual(ran.outcomes.pop("test_a"), "crashed")
        self.assertEqual(set(ran.outcomes), {f"test_{name}" for name in names} | {"test_z_is_fine"})
        self.assertEqual(set(ran.outcomes.values()), {"error"})
        self.assertRegex(ran["test_b"].said, "(?s)it was not run: .* exited with code 7.*no torch any more")
        self.assertEqual((ran.summary.interrupted, ran.summary.unfinished), (False, ()))


class RefusedTest(PreloadedServerCase):
    """The system refuses what a unit needs."""

    SOURCE = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass\n    def test_b(self): pass\n"
    PROJECT: Project

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.PROJECT = Project()
        cls.addClassCleanup(cls.PROJECT.close)

    def make_project(self):
        return self.PROJECT

    def test_a_folder(self):
        start = running_unit.RunningUnit
        refused = []

        def refuse_the_first(unit, *more):
            if not refused:
                refused.append(unit.tests[0].id.method)
                raise OSError(errno.ENOSPC, "No space left on device", "unit0")
            return start(unit, *more)

        with mock.patch.object(running_unit, "RunningUnit", refuse_the_first):
            ran = self.project.run(self.project.write(self.SOURCE), jobs=1)
        (first,) = refused
        self.assertEqual(ran.outcomes, {"test_a": "passed", "test_b": "passed", first: "error"})
        self.assertIn("No space left on device", ran[first].said)

    def test_a_log(self):
        def react(event):
            if isinstance(event, events.UnitBegan):
                (self.project.preloaded_server.directory / f"unit{event.unit.number}" / "log").mkdir(parents=True)

        ran = self.project.run(self.project.write(self.SOURCE), react=react, jobs=1)
        self.assertEqual(ran.outcomes, {"test_a": "error", "test_b": "error"})
        self.assertIn("the log of its process cannot be created", ran["test_a"].said)

    def test_a_temporary_folder(self):
        full = OSError(errno.ENOSPC, "No space left on device")
        with (
            mock.patch.object(tempfile, "mkdtemp", side_effect=full),
            self.assertRaisesRegex(CannotRun, "no temporary folder can be created: .*No space left"),
        ):
            file_processes.FileProcesses(self.project.root).__enter__()

    @pytest.mark.slow
    def test_the_preloaded_server(self):
        self.project = super().make_project()  # it is of no use to others afterwards
        with mock.patch.object(subprocess, "Popen", side_effect=BlockingIOError(errno.EAGAIN, "no more processes")):
            self.kill_preloaded_server()
            ran = self.project.run(file := self.project.write(self.SOURCE))
        self.assertEqual(ran.outcomes, {file: "error"})
        self.assertIn("cannot be started: [Errno 11] no more processes", ran[file].said)


if __name__ == "__main__":
    sys.exit(run_tests())
