"""Tests with the mark `world_size`: each outcome that ranks can have together, and what the report shows."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from kit.pytest_runs import PytestCase, PytestRun, run_pytest

from torch_testing_ext.common_utils import run_tests

SUBJECT = """
import asyncio, functools, logging, os, signal, sys, threading, unittest, warnings
from pathlib import Path
import pytest, torch
import torch.distributed as dist

def rank():
    return int(os.environ["RANK"])

class OwnWarning(UserWarning): ...

def until_killed():
    threading.Event().wait()

def drives(function):
    return functools.wraps(function)(lambda *args, **kwargs: [None for _ in function(*args, **kwargs)] and None)

def returns(function):
    return functools.wraps(function)(lambda *args: function(*args))

class TestPasses:
    pytestmark = pytest.mark.world_size(2)

    def test_group(self, dist_env):
        tensor = torch.ones(2) * (dist_env.rank + 1)
        dist.all_reduce(tensor, group=dist_env.group)
        assert tensor.tolist() == [3.0, 3.0]
        assert (dist_env.world_size, dist_env.local_rank, dist_env.backend) == (2, rank(), "gloo")
        dist_env.store.set(f"rank{rank()}", "here")
        assert dist_env.store.get(f"rank{1 - rank()}") == b"here"

    def test_env_rendezvous(self):
        assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2"
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"]
        dist.init_process_group("gloo")
        dist.barrier()

    def test_raises(self, dist_env):
        with pytest.raises(ZeroDivisionError):
            dist_env.rank / 0

    @pytest.fixture
    def properties(self, request):
        yield
        assert request.node.user_properties == [("key", "value of 0"), ("number", 3), ("path", "/x")]

    def test_tells(self, properties, record_property):
        print("printed", rank())
        print("complained", rank(), file=sys.stderr)
        logging.warning("logged %d", rank())
        warnings.warn("warned")
        warnings.warn(OwnWarning("own"))
        record_property("key", f"value of {rank()}")
        record_property("number", 3)
        record_property("path", Path("/x"))

    @pytest.mark.parametrize("number", [1, 2])
    def test_parametrized(self, number, capsys, caplog, recwarn):
        print(number)
        logging.error("number %d", number)
        warnings.warn("observed")
        assert capsys.readouterr().out == f"{number}\\n"
        assert f"number {number}" in caplog.text
        assert "observed" in str(recwarn.pop().message)

    def test_capfd(self, capfd):
        os.write(1, b"raw")
        assert capfd.readouterr().out == "raw"

@pytest.mark.world_size(2)
class TestAsync:
    async def test_coroutine(self, dist_env):
        await asyncio.sleep(0)
        assert dist_env.rank == 0, "in a coroutine"

    @pytest.mark.asyncio
    async def test_coroutine_for_a_plugin(self, dist_env):
        await asyncio.sleep(0)

    @drives
    def test_generator_that_is_driven(self, dist_env):
        yield
        assert dist_env.rank == 0, "in a generator"

    @returns
    def test_generator_that_is_returned(self):
        yield

@pytest.mark.world_size(2)
class CoroutineTest(unittest.IsolatedAsyncioTestCase):
    async def test_coroutine(self):
        self.assertEqual(rank(), 0)

@pytest.mark.world_size([1, 2])
def test_sizes():
    assert int(os.environ["WORLD_SIZE"]) in (1, 2)

@pytest.mark.world_size(2)
class UnittestTest(unittest.TestCase):
    def setUp(self):
        self.rank = rank()

    def test_passes(self):
        self.assertEqual(self.rank, rank())

    def test_fails(self):
        self.assertEqual(self.rank, 0)

    def test_subtest_fails(self):
        with self.subTest(number=1):
            self.assertEqual(self.rank, 0)

    def test_skips(self):
        self.skipTest("unittest's skip")

    @unittest.expectedFailure
    def test_expected(self):
        self.fail("as expected")

    @unittest.expectedFailure
    def test_unexpected(self):
        pass

    def test_tear_down_fails(self):
        self.addCleanup(self.assertEqual, self.rank, 0)

class TestFails:
    pytestmark = pytest.mark.world_size(2)

    def test_assertion(self):
        print("before the assertion")
        value = rank()
        assert value == 0

    def test_pytest_fail(self):
        if rank() == 1:
            pytest.fail("by pytest.fail")

    def test_killed(self):
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_exits_with_0(self):
        if rank() == 1:
            os._exit(0)

    def test_sys_exit_with_0(self):
        if rank() == 1:
            sys.exit(0)

    def test_pytest_exit(self):
        if rank() == 1:
            pytest.exit("enough", returncode=0)

    def test_skips_in_one_rank(self):
        if rank() == 1:
            pytest.skip("only here")

    @pytest.mark.world_size(2, timeout=1)
    def test_hangs(self):
        if rank() == 1:
            until_killed()

    def test_both_hang_after_the_end(self):
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def test_thread_raises_and_exits(self):
        thread = threading.Thread(target=os._exit, args=(0,))
        thread.start()
        thread.join()

    def test_forked_child(self):
        if os.fork() == 0:
            return
        assert os.wait()[1] == 0
        assert rank() == 0

    @pytest.mark.filterwarnings("error")
    def test_warning_is_an_error(self):
        if rank() == 1:
            warnings.warn("made an error")

    @pytest.mark.usefixtures("bad_tear_down")
    def test_tear_down(self):
        pass

    @pytest.mark.usefixtures("bad_set_up")
    def test_set_up(self):
        pass

@pytest.fixture
def bad_tear_down(dist_env):
    yield
    assert dist_env.rank == 0, "torn down"

@pytest.fixture
def bad_set_up(dist_env):
    assert dist_env.rank == 0, "set up"

@pytest.mark.world_size(2)
class TestMarks:
    def test_skips_in_all_ranks(self):
        pytest.skip("in all")

    def test_skips_by_unittest(self):
        raise unittest.SkipTest("by unittest")

    @pytest.mark.skip(reason="before any rank")
    def test_skip(self): ...

    @pytest.mark.skipif(True, reason="on a condition")
    def test_skipif(self): ...

    @pytest.mark.world_size(2, devices=99)
    def test_needs_devices(self): ...

    @pytest.mark.xfail(raises=ValueError, strict=True)
    def test_xfail(self):
        raise ValueError("expected")

    @pytest.mark.xfail(raises=ValueError)
    def test_xfail_in_one_rank(self):
        if rank() == 1:
            raise ValueError("expected")

    @pytest.mark.xfail(raises=ValueError)
    def test_xfail_by_another_error(self):
        raise (TypeError if rank() else ValueError)("not expected")

    @pytest.mark.xfail(raises=ValueError)
    def test_xfail_and_a_death(self):
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("expected")

    @pytest.mark.xfail(strict=True)
    def test_xfail_passes(self): ...

    def test_xfail_in_the_body(self):
        pytest.xfail("in the body")

    def test_xfail_added_in_the_body(self, request):
        request.node.add_marker(pytest.mark.xfail(reason="added"))
        raise ValueError

    def test_strict_xfail_added_in_the_body(self, request):
        request.node.add_marker(pytest.mark.xfail(strict=True))

    def test_strict_xfail_added_by_a_fixture(self, adds_xfail): ...

@pytest.fixture
def adds_xfail(request, dist_env):
    request.applymarker(pytest.mark.xfail(strict=True))
"""

# The reason or the first line of the message must contain the second text.
# Without subtests of pytest's own, a failed one fails the test as in a unittest.TestResult.
IN_SUBTEST = "in subtest {'number': '1'}" if hasattr(pytest, "Subtests") else "AssertionError: 1 != 0"
MODEL = {
    "TestPasses.test_group": ("passed", ""),
    "TestPasses.test_env_rendezvous": ("passed", ""),
    "TestPasses.test_raises": ("passed", ""),
    "TestPasses.test_tells": ("passed", ""),
    "TestPasses.test_parametrized[1]": ("passed", ""),
    "TestPasses.test_parametrized[2]": ("passed", ""),
    "TestPasses.test_capfd": ("passed", ""),
    "TestAsync.test_coroutine": ("failed", "AssertionError: in a coroutine"),
    "TestAsync.test_coroutine_for_a_plugin": ("passed", ""),
    "TestAsync.test_generator_that_is_driven": ("failed", "AssertionError: in a generator"),
    "TestAsync.test_generator_that_is_returned": ("failed", "returned a generator, and nothing of it has run"),
    "CoroutineTest.test_coroutine": ("failed", "rank 1 of 2 failed"),
    "test_sizes[world_size=1]": ("passed", ""),
    "test_sizes[world_size=2]": ("passed", ""),
    "UnittestTest.test_passes": ("passed", ""),
    "UnittestTest.test_fails": ("failed", "rank 1 of 2 failed"),
    "UnittestTest.test_subtest_fails": ("failed", IN_SUBTEST),
    "UnittestTest.test_skips": ("skipped", "unittest's skip"),
    "UnittestTest.test_expected": ("xfail", ""),
    "UnittestTest.test_unexpected": ("failed", "Unexpected success"),
    "UnittestTest.test_tear_down_fails": ("failed", "rank 1 of 2 failed"),
    "TestFails.test_assertion": ("failed", "rank 1 of 2 failed"),
    "TestFails.test_pytest_fail": ("failed", "Failed: by pytest.fail"),
    "TestFails.test_killed": ("failed", "rank 1 of 2 was killed by SIGKILL"),
    "TestFails.test_exits_with_0": ("failed", "rank 1 of 2 exited with code 0"),
    "TestFails.test_sys_exit_with_0": ("failed", "SystemExit: 0"),
    "TestFails.test_pytest_exit": ("failed", "Exit: enough"),
    "TestFails.test_skips_in_one_rank": ("failed", "skipped"),
    "TestFails.test_hangs": ("failed", "timed out after"),
    "TestFails.test_both_hang_after_the_end": ("failed", "timed out after"),
    "TestFails.test_thread_raises_and_exits": ("failed", "exited with code 0"),
    "TestFails.test_forked_child": ("failed", "rank 1 of 2 failed"),
    "TestFails.test_warning_is_an_error": ("failed", "UserWarning: made an error"),
    "TestFails.test_tear_down": ("failed", "in the tear-down of a fixture: AssertionError: torn down"),
    "TestFails.test_set_up": ("failed", "AssertionError: set up"),
    "TestMarks.test_skips_in_all_ranks": ("skipped", "in all"),
    "TestMarks.test_skips_by_unittest": ("skipped", "by unittest"),
    "TestMarks.test_skip": ("skipped", "before any rank"),
    "TestMarks.test_skipif": ("skipped", "on a condition"),
    "TestMarks.test_needs_devices": ("skipped", "Need at least 99 accelerator devices"),
    "TestMarks.test_xfail": ("xfail", ""),
    "TestMarks.test_xfail_in_one_rank": ("xfail", ""),
    "TestMarks.test_xfail_by_another_error": ("failed", "Error: not expected"),
    "TestMarks.test_xfail_and_a_death": ("failed", "of 2"),
    "TestMarks.test_xfail_passes": ("failed", "XPASS(strict)"),
    "TestMarks.test_xfail_in_the_body": ("xfail", "in the body"),
    "TestMarks.test_xfail_added_in_the_body": ("xfail", "added"),
    "TestMarks.test_strict_xfail_added_in_the_body": ("failed", "[XPASS(strict)]"),
    "TestMarks.test_strict_xfail_added_by_a_fixture": ("failed", "[XPASS(strict)]"),
}


class MarkedTestsTest(PytestCase):
    run_of_subject: PytestRun

    @classmethod
    def setUpClass(cls) -> None:
        cls.run_of_subject = run_pytest({"test_subject.py": SUBJECT}, "--dist-timeout=4")

    def test_every_outcome(self) -> None:
        self.assertOutcomes(self.run_of_subject, {name: outcome for name, (outcome, _) in MODEL.items()})
        self.assertEqual(self.run_of_subject.code, 1)
        for name, (_, text) in MODEL.items():
            with self.subTest(test=name):
                self.assertIn(text, self.run_of_subject.messages[name].partition("\n")[0])

    def test_the_verdict_is_shown_once_and_without_our_frames(self) -> None:
        text = self.run_of_subject.text
        _, _, failure = text.partition("_ TestFails.test_assertion _")
        failure = failure[: failure.index("\n____")]
        self.assertEqual(failure.count("rank 1 of 2 failed: "), 1)
        self.assertEqual(len(re.findall(r"  > +\d+ \| +assert value == 0\n", failure)), 1, failure)
        self.assertIn("assert 1 == 0\n", failure)
        self.assertIn("run again:  python -m pytest test_subject.py::TestFails::test_assertion\n", failure)
        self.assertIn("Captured stdout and stderr of rank 0 call ---", failure)
        self.assertEqual(failure.count("\nbefore the assertion"), 2)
        for frame in ("torch_testing_ext/", "pluggy", "RankFailure"):
            self.assertNotIn(frame, failure)
        self.assertIn("FAILED test_subject.py::TestFails::test_assertion - rank 1 of 2 failed", text)

    def test_output_logs_warnings_and_properties(self) -> None:
        output = self.run_of_subject.outputs["TestPasses.test_tells"]
        for rank in range(2):
            for text in (f"printed {rank}\n", f"complained {rank}\n", f"logged {rank}\n"):
                self.assertEqual(output.count(text), 1, output)
        self.assertEqual(self.run_of_subject.text.count("UserWarning: warned"), 1)
        self.assertEqual(self.run_of_subject.text.count(" OwnWarning: own"), 1)
        self.assertNotIn("UserWarning: observed", self.run_of_subject.text)


class WarningsTest(PytestCase):
    def test_exceptions_in_threads_and_finalizers_are_warnings_of_ranks_of_every_kind(self) -> None:
        """With a filter `error`, they fail the test, also where the ranks were forked under other filters."""
        source = """
import threading, warnings
import pytest
from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase
from torch_testing_ext.ranks import spawn

class Finalized:
    def __del__(self):
        raise ValueError("finalized")

def in_a_thread(name):
    thread = threading.Thread(target=lambda: {}[name], name=name)
    thread.start()
    thread.join()

def in_a_finalizer(name):
    Finalized.__del__.__qualname__ = name
    Finalized()

def in_a_cycle(name):
    Finalized.__del__.__qualname__ = name
    finalized = Finalized()
    finalized.itself = finalized

def warned(name):
    warnings.warn(name)

def methods_of(kind, *sources):
    return {f"test_{source.__name__}": method(source, f"{kind}_{source.__name__}") for source in sources}

def method(source, name):
    return lambda self: source(name)

def spawning(source, name):
    return lambda self: spawn(lambda rank: source(name), 2)

def set_up(self):
    super(type(self), self).setUp()
    self._spawn_processes()

SOURCES = (in_a_thread, in_a_finalizer, warned)
TestMarked = pytest.mark.world_size(2)(type("TestMarked", (), methods_of("marked", *SOURCES, in_a_cycle)))
TestSpawn = type("TestSpawn", (), {f"test_{one.__name__}": spawning(one, f"spawn_{one.__name__}") for one in SOURCES})
OwnTest = type("OwnTest", (MultiProcessTestCase,), {"world_size": 2, "setUp": set_up, **methods_of("own", *SOURCES)})
KeptTest = type("KeptTest", (MultiProcContinuousTest,), {"world_size": 2, **methods_of("kept", *SOURCES)})
ERROR = pytest.mark.filterwarnings("error")
TestMarkedError = ERROR(type("TestMarkedError", (TestMarked,), {}))
TestSpawnError = ERROR(type("TestSpawnError", (TestSpawn,), {}))
OwnErrorTest = ERROR(type("OwnErrorTest", (MultiProcessTestCase,), vars(OwnTest) | methods_of("own", *SOURCES)))
"""
        run = run_pytest({"test_x.py": source})
        names = {
            "in_a_thread": "PytestUnhandledThreadExceptionWarning: Exception in thread ",
            "warned": "UserWarning: ",
        }
        names["in_a_finalizer"] = names["in_a_cycle"] = "PytestUnraisableExceptionWarning: Exception ignored in"
        expected = {}
        for cls, kind in (("TestMarked", "marked"), ("TestSpawn", "spawn"), ("OwnTest", "own"), ("KeptTest", "kept")):
            for one in names if kind == "marked" else list(names)[:3]:
                name = f"{cls}.test_{one}"
                expected[name] = "passed"
                self.assertRegex(run.text, rf"{names[one]}.*{kind}_{one}\b", name)
                if kind != "kept":
                    failed = cls.removesuffix("Test") + ("ErrorTest" if cls.endswith("Test") else "Error")
                    expected[f"{failed}.test_{one}"] = "failed"
                    self.assertIn(names[one], run.messages[f"{failed}.test_{one}"])
        self.assertOutcomes(run, expected)


class OptionsTest(PytestCase):
    def test_streams_with_a_prefix_and_stops_at_the_first_failure(self) -> None:
        source = """
import os
import pytest

@pytest.mark.world_size(2)
def test_a():
    print("streamed")
    assert False

def test_b(): ...
"""
        run = run_pytest({"test_x.py": source}, "-s", "-x")
        self.assertOutcomes(run, {"test_a": "failed"})
        self.assertIn("[rank0] streamed\n", run.errors)
        self.assertIn("[rank1] streamed\n", run.errors)

    def test_log_cli_and_setup_show(self) -> None:
        """Records appear while the test runs, each after its rank and below one title; fixtures appear once."""
        source = """
import logging, time
import pytest

@pytest.fixture
def of_ranks(dist_env):
    yield dist_env.rank

@pytest.mark.world_size(3)
def test_a(of_ranks):
    logging.warning("a record of %s", of_ranks)

alone = logging.getLogger("alone")
alone.propagate = False  # from 9.1 on, pytest has its handlers there, too

@pytest.mark.world_size(2)
def test_b(of_ranks):
    logging.info("too fine")

def test_c():
    logging.warning("without ranks")

@pytest.mark.world_size(2)
def test_d(of_ranks):
    alone.warning("a record of %s alone", of_ranks)
"""
        passed = dict.fromkeys(("test_a", "test_b", "test_c", "test_d"), "passed")
        run = run_pytest({"test_x.py": source}, "-v", "-o", "log_cli=true", "--log-cli-level=WARNING")
        self.assertOutcomes(run, passed)
        shown = [line for line in run.text.splitlines() if line.startswith("[rank") or "live log" in line]
        alone = [line for line in run.text.splitlines() if "alone:test_x.py" in line]
        self.assertEqual(len(alone), 2 if pytest.version_tuple >= (9, 1) else 0)
        self.assertEqual({line[:6] for line in alone}, {"[rank0", "[rank1"} if alone else set())
        shown = shown[: len(shown) - len(alone) - 1] if alone else shown
        first, *records, call = shown
        self.assertEqual((first.strip(" -"), call.strip(" -")), ("live log of ranks", "live log call"))
        self.assertEqual(len(records), 3)
        for rank, record in enumerate(sorted(records)):
            self.assertRegex(record, rf"\[rank{rank}\] WARNING +root:test_x.py:11 a record of {rank}")
        run = run_pytest({"test_x.py": source}, "--setup-show")
        self.assertOutcomes(run, passed)
        for what in "SETUP", "TEARDOWN":
            self.assertEqual(len(re.findall(rf"{what} +F of_ranks", run.text)), 3)

    def test_what_torch_logs_of_an_error(self) -> None:
        """From 9.1 on, pytest captures torch's own record of each error, with all of gloo's text."""
        source = """
import pytest
import torch
import torch.distributed as dist

@pytest.mark.world_size(2)
def test_a(dist_env):
    with pytest.raises((RuntimeError, ValueError)):
        dist.broadcast(torch.ones(1), src=7)
    assert not dist_env
"""
        run = run_pytest({"test_x.py": source})
        self.assertOutcomes(run, {"test_a": "failed"})
        self.assertNotIn("func_name", run.text)

    def test_without_plugins_of_pytest(self) -> None:
        """Their options are not there, either."""
        source = """
import pytest

@pytest.mark.world_size(2)
def test_a(dist_env): ...

@pytest.mark.standalone
def test_b(): ...
"""
        without = [word for name in ("capture", "debugging", "setuponly", "logging") for word in ("-p", f"no:{name}")]
        run = run_pytest({"test_x.py": source}, *without)
        self.assertOutcomes(run, {"test_a": "passed", "test_b": "passed"})

    def test_ranks_that_cannot_be_forked_are_an_error_that_says_why(self) -> None:
        source = """
import threading
import pytest

@pytest.fixture
def thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="busy")
    thread.start()
    yield
    done.set()
    thread.join()

@pytest.mark.world_size(2)
def test_a(thread): ...

@pytest.mark.world_size(2)
def test_b(): ...

@pytest.mark.world_size(2)
def test_c(monkeypatch, spawning): ...

@pytest.fixture
def spawning(monkeypatch):
    monkeypatch.setenv("TORCH_TESTING_EXT_START", "spawn")
"""
        run = run_pytest({"test_x.py": source})
        self.assertOutcomes(run, {"test_a": "failed", "test_b": "passed", "test_c": "failed"})
        self.assertIn("it runs other threads (busy)", run.messages["test_a"])
        self.assertIn("ask for dist_env", run.messages["test_a"])
        self.assertIn("TORCH_TESTING_EXT_START=spawn", run.messages["test_c"])

    def test_fixtures_that_start_ranks(self) -> None:
        source = """
import os

def body(rank, wanted):
    print("in rank", rank)
    assert rank == wanted or wanted < 0

def test_passes(spawn, run_script, tmp_path):
    spawn(body, 2, -1)
    script = tmp_path / "script.py"
    script.write_text("import os; print('script', os.environ['RANK'])")
    assert run_script(script, ranks=2).outputs == ("script 0\\n", "script 1\\n")

def test_fails(spawn):
    spawn(body, 2, 0)
"""
        run = run_pytest({"test_x.py": source})
        self.assertOutcomes(run, {"test_passes": "passed", "test_fails": "failed"})
        self.assertIn("[rank1] in rank 1\n", run.outputs["test_passes"])
        self.assertIn("rank 1 of 2 failed", run.messages["test_fails"])
        self.assertIn("\ntest_x.py:15: in test_fails", run.messages["test_fails"])
        self.assertNotIn("torch_testing_ext/", run.messages["test_fails"])

    def test_under_xdist(self) -> None:
        source = """
import os
import pytest

@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", range(3))
def test_a(number, dist_env):
    assert number < 2 or dist_env.rank == 0
"""
        run = run_pytest({"test_x.py": source}, "-n", "2")
        self.assertOutcomes(run, {"test_a[0]": "passed", "test_a[1]": "passed", "test_a[2]": "failed"})
        self.assertIn("rank 1 of 2 failed", run.messages["test_a[2]"])


class FixturesTest(PytestCase):
    def test_which_fixtures_run_where(self) -> None:
        """Those that need dist_env run in each rank, the others once, in the parent; ranks inherit what they gave."""
        source = """
import os
from pathlib import Path
import pytest

PARENT = os.getpid()

def write(text):
    with open(Path(__file__).with_name("written"), "a") as file:
        file.write(text + "\\n")

def where():
    return "parent" if os.getpid() == PARENT else f"rank {os.environ['RANK']}"

def fixture(scope, *, name):
    def body():
        write(f"set up {name} in {where()}")
        yield [name]
        write(f"tear down {name} in {where()}")
    return pytest.fixture(scope=scope, name=name)(body)

session = fixture("session", name="of_session")
module = fixture("module", name="of_module")
function = fixture("function", name="of_function")

@pytest.fixture
def in_ranks(dist_env, of_function):
    write(f"set up in_ranks in {where()}")
    yield dist_env.rank
    write(f"tear down in_ranks in {where()}")

@pytest.fixture
def on_top(in_ranks):
    return in_ranks + 1

@pytest.mark.world_size(2)
def test_a(of_session, of_module, of_function, on_top, tmp_path, monkeypatch):
    monkeypatch.setenv("CHANGED", "1")
    assert on_top == int(os.environ["RANK"]) + 1
    of_module.append(f"changed in {where()}")
    (tmp_path / where()).touch()
    write(f"test_a in {where()}: {of_session}")

def test_b(of_session, of_module):
    assert of_module == ["of_module"]
    assert "CHANGED" not in os.environ
    write(f"test_b in {where()}")
"""
        with tempfile.TemporaryDirectory() as folder:
            run = run_pytest({"test_x.py": source}, folder=folder)
            lines = Path(folder, "written").read_text().splitlines()
        self.assertOutcomes(run, {"test_a": "passed", "test_b": "passed"})
        in_parent = [line for line in lines if "in parent" in line]
        self.assertEqual(
            in_parent,
            [
                *("set up of_session in parent", "set up of_module in parent", "set up of_function in parent"),
                *("tear down of_function in parent", "test_b in parent"),
                *("tear down of_module in parent", "tear down of_session in parent"),
            ],
        )
        for rank in range(2):
            self.assertEqual(
                [line.replace(f"in rank {rank}", "") for line in lines if f"in rank {rank}" in line],
                ["set up in_ranks ", "test_a : ['of_session']", "tear down in_ranks "],
            )


if __name__ == "__main__":
    run_tests()
