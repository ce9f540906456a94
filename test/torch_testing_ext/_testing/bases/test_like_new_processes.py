"""Ranks are like new processes: they see nothing of setUp, and end by exit codes as those do."""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from typing import ClassVar
from unittest import mock

import pytest
import torch
from kit.files import subject
from kit.outcomes import outcome_of
from kit.ranks import Ranks, outcome_and_told, ranks_told

from torch_testing_ext import launch
from torch_testing_ext._testing.bases import process_ranks_test_case, rank_life, ranked_test_case
from torch_testing_ext._testing.bases.expected_imports import expected_imports
from torch_testing_ext.common_distributed import (
    TEST_SKIPS,
    MultiProcContinuousTest,
    MultiThreadedTestCase,
    skip_if_lt_x_gpu,
    skip_if_small_worldsize,
)
from torch_testing_ext.common_utils import TemporaryDirectoryName, TestCase, run_tests
from torch_testing_ext.launch import start
from torch_testing_ext.launch.fork_server_client import Run
from torch_testing_ext.launch.fork_server_messages import Preload

GLOBAL = {"set by": "nobody"}


class Changes(Ranks):
    """Changes this process in setUp."""

    of_the_class = "as written"

    def setUp(self):
        GLOBAL["set by"] = "setUp"
        type(self).of_the_class = "changed"
        torch.set_default_dtype(torch.float64)
        self.addCleanup(torch.set_default_dtype, torch.float32)
        self.addCleanup(GLOBAL.update, {"set by": "nobody"})
        super().setUp()

    def sees(self):
        self.tell([GLOBAL["set by"], self.of_the_class, str(torch.get_default_dtype())])

    @skip_if_lt_x_gpu(1000)
    def needs_devices(self): ...

    @skip_if_small_worldsize
    def needs_what_set_up_sets(self): ...


class ChangesThenPersistent(MultiProcContinuousTest):
    world_size = 1

    @classmethod
    def backend_str(cls):
        return "gloo"

    def setUp(self):
        GLOBAL["set by"] = "setUp"
        self.addCleanup(GLOBAL.update, {"set by": "nobody"})
        super().setUp()

    def sees_nothing(self):
        self.assertEqual(GLOBAL["set by"], "nobody")


class Attributes(Ranks):
    def tells(self):
        self.tell([hasattr(self, name) for name in ("processes", "pid_to_pipe", "special_return_code_checks")])


class ThreadAttributes(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def has_no_threads(self):
        self.assertFalse(hasattr(self, "threads"))


class Exits(Ranks):
    def all_skip(self):
        os._exit(TEST_SKIPS["importerror"].exit_code)

    def one_skips(self):
        if self.rank == 1:
            os._exit(TEST_SKIPS["importerror"].exit_code)

    def no_skip(self):
        os._exit(71)


class Hangs(Ranks):
    called: ClassVar[list[bool]] = []

    def _get_timedout_process_traceback(self):
        self.called.append(all(process.is_alive() for process in self.processes))

    def hangs(self):
        time.sleep(100)

    def passes(self): ...


class RaisesAtTimeOut(Hangs):
    def _get_timedout_process_traceback(self):
        raise ValueError("in the hook")


class WithoutFileName(Ranks):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        self = cls(test_name)
        self.rank = rank
        self.run_test(test_name, pipe)

    def passes(self): ...


class HasBadNeed(Ranks):
    error: ClassVar[Exception]

    def _known_skip(self):
        raise self.error

    def passes(self): ...


class Imports(Ranks):
    def tells(self):
        self.tell("tabnanny" in sys.modules)

    def tells_what_is_collected(self):
        here = self.tells
        tracked = [id(value) for value in gc.get_objects()]
        self.tell([id(value) in tracked for value in (here, sys.modules["tabnanny"].check)])


class TestBadNeeds(TestCase):
    def test_only_one_that_reads_what_set_up_sets_may_skip(self):
        """Any other error is one of the need: it is raised again, and shown, when the ranks are to start."""
        for error, may_skip in ((AttributeError("no processes yet"), True), (ValueError("a bug"), False)):
            with mock.patch.object(HasBadNeed, "error", error, create=True):
                self.assertEqual(process_ranks_test_case._skips_without_set_up(HasBadNeed("passes")), may_skip)
                seen = outcome_of(HasBadNeed("passes"))
                self.assertEqual((seen.outcome, str(error) in seen.message), ("error", True), seen.message)


class TestState(TestCase):
    def setUp(self):
        super().setUp()
        launch.close()
        self.addCleanup(launch.close)
        self.addCleanup(setattr, Changes, "of_the_class", "as written")

    def test_first_ranks_see_nothing_of_set_up(self):
        self.assertEqual(ranks_told(Changes("sees")), [["nobody", "as written", "torch.float32"]] * 2)

    def test_persistent_ranks_see_nothing_of_set_up(self):
        self.addCleanup(ChangesThenPersistent.doClassCleanups)
        self.assertEqual(outcome_of(ChangesThenPersistent("sees_nothing")), ("passed", ""))

    def test_no_server_for_a_test_that_skips(self):
        with mock.patch.object(start, "ForkServerClient") as server:
            self.assertEqual(outcome_of(Changes("needs_devices")).outcome, "skipped")
        server.assert_not_called()

    def test_a_need_that_set_up_provides_for(self):
        with mock.patch.dict(os.environ, WORLD_SIZE=""):  # int("") raises before setUp
            self.assertEqual(outcome_of(Changes("needs_what_set_up_sets")).outcome, "error")
        with mock.patch.dict(os.environ, WORLD_SIZE="2", BACKEND="gloo"):
            self.assertEqual(outcome_of(Changes("needs_what_set_up_sets")).outcome, "skipped")

    def test_attributes_of_set_up(self):
        self.assertEqual(ranks_told(Attributes("tells")), [[False, False, False]] * 2)
        self.assertEqual(outcome_of(ThreadAttributes("has_no_threads")), ("passed", ""))


class TestEnds(TestCase):
    def test_the_exit_code_of_a_skip(self):
        self.assertEqual(outcome_of(Exits("all_skip")), ("skipped", TEST_SKIPS["importerror"].message))

    def test_the_exit_code_of_a_skip_of_one_rank(self):
        self.assertEqual(outcome_of(Exits("one_skips")).outcome, "failed")

    def test_another_exit_code(self):
        self.assertEqual(outcome_of(Exits("no_skip")).outcome, "error")

    def test_the_hook_for_time_outs(self):
        Hangs.called.clear()
        with mock.patch.dict(ranked_test_case.TIMEOUT_OVERRIDE, hangs=0.5):
            self.assertIn("timed out", outcome_of(Hangs("hangs")).message)
            self.assertIn("ValueError: in the hook", outcome_of(RaisesAtTimeOut("hangs")).message)
        self.assertEqual(Hangs.called, [True])
        outcome_of(Hangs("passes"))
        self.assertEqual(Hangs.called, [True])

    def test_run_without_file_name(self):
        self.assertEqual(outcome_and_told(WithoutFileName("passes"))[0], ("passed", ""))


class TestExpectedImports(TestCase):
    def test_by_the_names_in_the_file(self):
        for_inductor = ("torch._dynamo", "torch._inductor.compile_fx")
        table = {
            "from torch.nn.parallel import DistributedDataParallel as DDP": ("torch._dynamo",),
            "step = torch.compile(step)": ("torch._dynamo",),
            "step = torch.compile(step, backend='inductor')": for_inductor,
            "import torch._inductor.config; torch.compile(step)": for_inductor,
            "class T(DTensorTestBase): ...": (),
            "dist.all_reduce(tensor)": (),
        }
        for number, (source, modules) in enumerate(table.items()):
            with self.subTest(source), TemporaryDirectoryName() as directory:
                file = os.path.join(directory, f"test_{number}.py")
                with open(file, "w") as out:
                    out.write(source)
                self.assertEqual(expected_imports(file), modules)
        self.assertEqual(expected_imports("/no/such/file.py"), ())

    def test_ranks_find_them(self):
        launch.close()
        self.addCleanup(launch.close)
        launch.prepare(launch.Named.of(Imports), ("tabnanny",))
        self.assertEqual(ranks_told(Imports("tells")), [True] * 2)
        self.assertNotIn("tabnanny", sys.modules)

    def test_they_are_hints(self):
        launch.close()
        self.addCleanup(launch.close)
        launch.prepare(launch.Named.of(Imports), ("tabnanny",))
        self.addCleanup(start.launcher().preload_hints.pop, "tabnanny", None)
        self.assertIn("tabnanny", launch.preload_hints())

    def test_also_if_the_launch_comes_before_the_import(self):
        launch.close()
        self.addCleanup(launch.close)
        launch.prepare(launch.Named.of(Imports))
        server = start.launcher().server
        os.kill(server.pid, signal.SIGSTOP)
        server.send(Preload(("tabnanny",), at_once=True))
        wait_until = Run.wait_until

        def resume_and_wait(run, *args):
            os.kill(server.pid, signal.SIGCONT)
            wait_until(run, *args)

        with mock.patch.object(Run, "wait_until", resume_and_wait):
            self.assertEqual(ranks_told(Imports("tells")), [True] * 2)

    def test_ranks_do_not_look_through_them_for_garbage(self):
        """Each rank of a test of pytest does so at its end: torch's compiler would cost it a tenth of a second."""
        launch.close()
        self.addCleanup(launch.close)
        launch.prepare(launch.Named.of(Imports), ("tabnanny",))
        self.assertEqual(ranks_told(Imports("tells_what_is_collected")), [[True, False]] * 2)

    def test_only_of_modules_that_can_be_imported(self):
        """inductor puts each kernel into sys.modules, below a module that is no package."""
        made = {f"torch.made_by_code_{i}": types.ModuleType("made") for i in range(20)}
        spec = importlib.util.find_spec("tabnanny")
        found = {f"torch.found_{i}": importlib.util.module_from_spec(spec) for i in range(20)}
        before = len(sys.modules)
        with mock.patch.dict(sys.modules, made | found):
            self.assertEqual(rank_life._imported_since(before), tuple(found))

    def test_a_preload_that_fails_is_named(self):
        """Each rank then imports the module itself, and its test says more if that fails, too."""
        launch.close()
        self.addCleanup(launch.close)
        self.addCleanup(start.launcher().preload_hints.pop, "no_such_module", None)
        with tempfile.TemporaryFile("w+") as stderr, mock.patch.object(sys, "stderr", stderr):
            launch.prepare(launch.Named.of(Imports), ("no_such_module",))
            self.assertEqual(ranks_told(Imports("tells")), [False] * 2)
            stderr.seek(0)
            self.assertIn("importing no_such_module failed: ModuleNotFoundError: No module named", stderr.read())

    @pytest.mark.slow
    def test_ranks_of_a_plain_test_import_nothing_themselves(self):
        """An import costs every rank of every test; this one has the file and the class in no file at all."""
        done = subprocess.run([sys.executable, "-"], input=IMPORTS_OF_RANKS, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, "passed\n"), done.stderr)


IMPORTS_OF_RANKS = subject(__file__, "imports_of_ranks.py")


if __name__ == "__main__":
    run_tests()
