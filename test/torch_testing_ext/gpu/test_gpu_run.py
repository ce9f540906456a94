"""The command that makes all checks on a GPU, benchmarks/gpu/run, with made-up checks and its own on the CPU.

What its checks find on a GPU is not tested here: that is what they are for.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

import torch

from torch_testing_ext._machine import nvml

ROOT = Path(__file__).resolve().parents[3]
COMMAND = ROOT / "benchmarks" / "gpu" / "run"


def load(name):
    """A module of the command, under a name that no other has."""
    folder = COMMAND.parent
    spec = importlib.util.spec_from_file_location(f"gpu_run_{name}", folder / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        spec.loader.exec_module(module)
    return module


main = load("main")

PASSES = '''
"""It passes."""
ORDER = 1
def on_cpu(c):
    c.expect(c.quick, "it is quick")
    c.figure("speed", 1.5, "m/s")
    c.note("a | in a table")
'''
ON_GPU = '''
"""It needs a GPU."""
ORDER = 2
def check(c):
    raise AssertionError("it ran without a GPU")
'''
FAILS = '''
"""Something does not hold; it goes on."""
ORDER = 3
def on_cpu(c):
    c.expect(1 == 2, "one is two", 1)
    c.expect(True, "the rest holds")
    print("what it has printed")
'''
HANGS = '''
"""It hangs, and so does a process that it has started, in a session of its own."""
import os, subprocess, sys, time
ORDER = 4
QUICK_LIMIT = 2.0
def on_cpu(c):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    c.figure("child", child.pid)
    c.expect(True, "it got so far")
    time.sleep(600)
'''
DIES = '''
"""It dies."""
import os, signal
ORDER = 5
def on_cpu(c):
    c.expect(True, "it got so far")
    os.kill(os.getpid(), signal.SIGSEGV)
'''
IS_NO_PYTHON = "ORDER = 6\ndef on_cpu(c:\n"
CHECKS_NOTHING = '''
"""It checks nothing."""
ORDER = 7
def on_cpu(c):
    pass
'''
SKIPS = '''
"""It cannot be made here."""
ORDER = 8
def on_cpu(c):
    c.skip("there is no moon")
'''
EXITS = '''
"""It exits with 0 before it is over."""
import os
ORDER = 9
def on_cpu(c):
    c.expect(True, "it got so far")
    os._exit(0)
'''


class CommandCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="torch_testing_ext_test_")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.checks = self.folder / "checks"
        self.checks.mkdir()
        self.out = self.folder / "out"

    def write(self, **checks):
        for name, text in checks.items():
            (self.checks / f"{name}.py").write_text(text)

    def run_command(self, *argv, own_checks=False, environ=None):
        which = () if own_checks else ("--checks", str(self.checks))
        # A GPU of this machine must not take part.
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, **(environ or {})}
        ended = subprocess.run(
            ["bash", str(COMMAND), *which, *argv],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.stdout, self.stderr = ended.stdout, ended.stderr
        file = self.out / "gpu.json"
        self.document = json.loads(file.read_text()) if file.exists() else {}
        self.found = {one["name"]: one for one in self.document.get("checks", [])}
        return ended.returncode


class MadeUpChecksTest(CommandCase):
    def test_every_kind_of_end(self):
        self.write(
            passes=PASSES,
            on_gpu=ON_GPU,
            fails=FAILS,
            hangs=HANGS,
            dies=DIES,
            is_no_python=IS_NO_PYTHON,
            checks_nothing=CHECKS_NOTHING,
            skips=SKIPS,
            exits=EXITS,
        )
        self.assertEqual(self.run_command("--quick", str(self.out)), 1, self.stderr)
        self.assertEqual(
            {name: one["status"] for name, one in self.found.items()},
            {
                "passes": "passed",
                "on-gpu": "skipped",
                "fails": "failed",
                "hangs": "failed",
                "dies": "failed",
                "is-no-python": "failed",
                "checks-nothing": "failed",
                "skips": "skipped",
                "exits": "failed",
            },
        )
        whys = {name: one["why"] for name, one in self.found.items()}
        self.assertEqual(whys["on-gpu"], "there is no GPU")
        self.assertEqual(whys["fails"], "one is two (found: 1)")
        # Its own limit is 2 s, and it may have what the others leave.
        self.assertRegex(whys["hangs"], "^its process did not end within [234] s:")
        self.assertRegex(whys["dies"], "its process was killed by SIGSEGV")
        self.assertRegex(whys["is-no-python"], "its process exited with 1: SyntaxError")
        self.assertEqual(whys["checks-nothing"], "it has checked nothing")
        self.assertEqual(whys["skips"], "there is no moon")
        self.assertRegex(whys["exits"], "its process exited with 0")
        self.assertEqual(self.found["passes"]["figures"], [{"name": "speed", "value": 1.5, "unit": "m/s"}])
        self.assertEqual(self.found["fails"]["holds"], ["the rest holds"])
        self.assertIn("what it has printed", self.found["fails"]["output"])
        self.assertEqual(self.found["hangs"]["holds"], ["it got so far"])  # what was said before is kept
        (child,) = [figure["value"] for figure in self.found["hangs"]["figures"]]
        with self.assertRaises(ProcessLookupError):
            os.kill(child, signal.SIG_DFL)
        self.assertIn(self.document["facts"]["python"], sys.version)
        self.assertRegex(self.document["facts"]["torch"], r"^\d")
        text = (self.out / "gpu.md").read_text()
        self.assertIn("| passes | passed (on the CPU) |", text)
        self.assertIn("| on-gpu | skipped | 0.0 s | there is no GPU |", text)
        self.assertIn("| fails | **FAILED** (on the CPU) |", text)
        self.assertIn("| speed | 1.5 m/s |", text)
        self.assertIn("what it has printed", (self.out / "gpu.log").read_text())

    def test_all_passed(self):
        self.write(passes=PASSES, on_gpu=ON_GPU)
        self.assertEqual(self.run_command("--quick", "--only", "passes", str(self.out)), 0, self.stderr)
        self.assertEqual(list(self.found), ["passes"])
        self.assertEqual(self.document["exit_code"], 0)

    def test_no_time_left(self):
        self.write(passes=PASSES)
        self.assertEqual(self.run_command("--quick", "--minutes", "0", str(self.out)), 1, self.stderr)
        self.assertEqual(self.found["passes"]["status"], "not run")
        self.assertIn("| passes | **not run** ", (self.out / "gpu.md").read_text())

    def test_usage_errors(self):
        self.write(passes=PASSES)
        for argv, expected in (
            ([], "OUT"),
            (["--only", "nothing", str(self.out)], "nothing is not a check; known are: passes"),
            (["--slow", str(self.out)], "--slow"),
            (["/proc/1/out"], "/proc/1/out cannot be written to"),
        ):
            self.assertEqual(self.run_command(*argv), 4)
            self.assertIn(expected, self.stderr)
            self.assertEqual(len(self.stderr.strip().splitlines()), 1, self.stderr)


class TestLimits(unittest.TestCase):
    """What the checks say of themselves: no check runs."""

    def setUp(self):
        self.plans = main.read_plans(main.HERE / "checks")

    def run_with(self, gpus, seconds):
        run = main.Run.__new__(main.Run)
        run.quick, run.until, run.facts = False, time.monotonic() + seconds, {"devices": [{}] * gpus}
        return run

    def test_a_gpu_that_cannot_be_used_is_trouble(self):
        """The probe dies when it opens the GPU: the checks that skip then show nothing."""
        for code, facts, expected in ((1, {"driver": "580"}, 1), (0, {"driver": "580"}, 0), (0, {}, 1)):
            run = self.run_with(0, 100.0)
            run.facts, run.outcomes, run.say, run.write = {}, [], mock.Mock(), mock.Mock()
            lines = [{"facts": facts}]
            run.run_process = lambda *_, lines=lines, code=code: main.Ended(
                lines, code, False, 90.0, 1.0, "Invalid device"
            )
            run.probe()
            self.assertEqual(run.exit_code, expected, run.facts)

    def test_all_checks_of_one_gpu_fit(self):
        on_one = [plan.limit for plan in main.choose(self.plans, "") if plan.gpus == 1]
        self.assertLessEqual(sum(on_one), 60 * main.MINUTES)

    def test_checks_for_two_gpus_are_named_on_one(self):
        run = self.run_with(1, 100.0)
        whys = {plan.name: run.why_not(plan) for plan in self.plans if run.why_not(plan)}
        self.assertEqual(whys, dict.fromkeys(("two-gpus", "peer-is-gone"), "it takes 2 GPUs, and there is 1"))
        self.assertEqual([plan for plan in self.plans if self.run_with(2, 100.0).why_not(plan)], [])

    def test_checks_that_only_measure_run_if_they_are_named(self):
        usual = {plan.name for plan in main.choose(self.plans, "")}
        self.assertEqual({plan.name for plan in self.plans} - usual, {"spmd-speed"})
        self.assertEqual([plan.name for plan in main.choose(self.plans, "spmd-speed")], ["spmd-speed"])

    def test_time_that_is_left_over_is_shared(self):
        """Each check has its own limit at least, if all of them fit."""
        first, *later = (main.Plan(name, Path(name), "", 0, 20.0, 20.0, True, True) for name in "abc")
        for left, expected in ((60.0, 20.0), (90.0, 30.0), (600.0, 40.0), (30.0, 10.0)):
            run = self.run_with(1, left)
            started = run.run_process = mock.Mock(side_effect=StopIteration)
            run.say = mock.Mock()
            with contextlib.suppress(StopIteration):
                run.measure(first, "gpu", later)
            self.assertAlmostEqual(started.call_args.args[2], expected, places=1)


PROJECT = COMMAND.parent / "project"


class Noted:
    """What a check says, in the process of the test."""

    def __init__(self, folder):
        self.quick, self.root, self.folder = False, ROOT, folder
        self.broken, self.held, self.said = [], [], []

    def expect(self, holds, what, otherwise=""):
        (self.held if holds else self.broken).append(what)
        return bool(holds)

    def figure(self, name, value, unit=""):
        self.said.append(f"{name}: {value} {unit}")

    def note(self, text):
        self.said.append(text)

    def skip(self, why):
        raise unittest.SkipTest(why)


def names_of(file):
    """The names of the tests in a file, as far as it writes them down."""
    return re.findall(r"def (test_\w+)", (PROJECT / file).read_text()) if (PROJECT / file).exists() else []


def results_of(names, outcome="passed"):
    """A document of a run in which all of these tests have ended so, on a GPU that each shares."""
    memory = {"reserved": 1 << 20, "allocated": 1 << 20}
    attempt = {"message": "rank 1 of 2: all_reduce", "devices": ["0"], "sharing": {"ranks": 4, "backend": "gloo"}}
    attempt = {**attempt, "began": 1.0, "seconds": 2.0, "device_memory": memory}
    tests = [{"id": f"f.py::T::{name}", "outcome": outcome, "seconds": 2.0, "attempts": [attempt]} for name in names]
    for one in tests:
        one["counts_as"] = "passed" if outcome == "passed" else "failed"
    return {"began": 1e9, "seconds": 9.0, "verdicts": {outcome: len(names)}, "tests": tests, "warnings": ["a warning"]}


class DryRunTest(unittest.TestCase):
    """Each check judges runs that are made up: what is wrong on a GPU is told, and is no error of the check."""

    # They use CUDA themselves.
    ON_CUDA = ("fork_survives", "memory_back", "topology", "spmd_speed")

    def setUp(self):
        # Before torch.cuda is replaced: the checks take a constant from it.
        importlib.import_module("torch_testing_ext.runner.engine.memory_return")
        folder = tempfile.TemporaryDirectory(prefix="torch_testing_ext_test_")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for patch in (
            mock.patch.object(sys, "path", [str(COMMAND.parent), *sys.path]),
            mock.patch.dict(os.environ),
            mock.patch.object(torch, "cuda"),
            mock.patch.object(torch, "ones"),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        torch.cuda.device_count.return_value = 2
        torch.cuda.nccl.version.return_value = (2, 30, 7)
        for name in ("runs", "suites"):
            self.addCleanup(sys.modules.pop, name, None)
        self.runs = importlib.import_module("runs")
        answers = mock.Mock(usage=lambda: {"GPU-0": mock.Mock(memory=1 << 30)})
        opened = mock.patch.object(nvml, "open_nvml", lambda: answers)
        opened.start()
        self.addCleanup(opened.stop)

    def judge(self, name, part, finished_of):
        """Let a check judge a run, which `finished_of` makes up for the file and the tests of its arguments."""

        def run_test(check, *argv, **_):
            file = next((word for word in argv if word.endswith(".py")), "")
            return self.runs.Finished(*finished_of(names_of(file)))

        said = Noted(self.folder)
        with mock.patch.object(self.runs, "run_test", run_test):
            spec = importlib.util.spec_from_file_location(name, COMMAND.parent / "checks" / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            if not hasattr(module, part):
                return None
            getattr(module, part)(said)
        return said

    def test_no_check_has_an_error_of_its_own(self):
        made_up = {
            "no results": lambda names: (3, "it did not start", {}),
            "all passed": lambda names: (0, "shared by 4 ranks", results_of(names)),
            "all failed": lambda names: (1, "no", results_of(names, "timeout")),
        }
        names = {path.stem for path in (COMMAND.parent / "checks").glob("*.py")}
        self.assertLessEqual(set(self.ON_CUDA), names)
        for name in sorted(names.difference(self.ON_CUDA)):
            for how, finished_of in made_up.items():
                for part in ("check", "on_cpu"):
                    with self.subTest(name=name, how=how, part=part):
                        shutil.rmtree(self.folder / "meeting", ignore_errors=True)
                        said = self.judge(name, part, finished_of)
                        if said is not None and how != "all passed":
                            self.assertNotEqual(said.broken, [])

    def test_a_hang_whose_title_names_no_rank(self):
        def without_rank(names):
            document = results_of(names, "timeout")
            attempt = document["tests"][-1]["attempts"][-1]
            for test in document["tests"]:
                message = "rank 1 never reached all_reduce #2\nrank 1: in do_not_come"
                if test is document["tests"][-1]:
                    message = "timed out after 8 s\nrank 1: running; rank 0: in all_reduce #2"
                test["attempts"] = [{**attempt, "message": message}]
            return 1, "", document

        said = self.judge("hang_sources", "check", without_rank)
        why = "without the stacks of the rank that does not come, the title names rank 1"
        self.assertEqual(said.broken, [why])

    def test_which_tests_were_on_the_gpu(self):
        """Those of the SPMD compiler, all of them, and no other."""

        def with_memory(*on_gpu):
            document = results_of(("test_sgd", "test_adam", "test_load"))
            for test, file in zip(document["tests"], ("data_parallel", "data_parallel", "checkpoint"), strict=True):
                test["id"] = test["id"].replace("f.py", f"test/distributed/test_{file}.py")
                if not test["id"].endswith(on_gpu):
                    test["attempts"] = [{**test["attempts"][-1], "device_memory": None, "devices": []}]
            return lambda names: (0, "", document)

        why = ["the tests of the SPMD compiler have memory of a GPU"]
        for on_gpu, broken in (
            (("test_sgd", "test_adam"), []),
            (("test_sgd",), why),
            (("test_sgd", "test_adam", "test_load"), why),
        ):
            self.assertEqual(self.judge("run_test", "check", with_memory(*on_gpu)).broken, broken, on_gpu)

    def test_300_tests_in_one_rank(self):
        """Each has little to compare with if the others had ranks of their own."""

        def ended(last):
            document = results_of([*(f"test_many_number_{number}" for number in range(300)), "test_zz_in_one_rank"])
            document["tests"][-1]["outcome"] = last
            return lambda names: (int(last != "passed"), "", document)

        self.assertEqual(self.judge("nothing_left", "check", ended("passed")).broken, [])
        broken = self.judge("nothing_left", "check", ended("failed")).broken
        self.assertEqual(broken, ["all 300 tests have the same rank"])

    def test_a_rank_that_was_killed(self):
        """The time until the verdict counts from the kill."""

        def killed(names):
            document = results_of(names, "crashed")
            for test, rank in zip(document["tests"], (0, 1), strict=True):
                test["attempts"] = [{**test["attempts"][-1], "message": f"rank {rank} of 2 was killed by SIGKILL"}]
            return 1, "", document

        for delay, expected in ((1.0, 0), (-30.0, 2)):
            for name in ("test_alone", "test_with_a_peer"):
                (self.folder / name).write_text(str(1e9 + delay))
            said = self.judge("killed_in_nccl", "check", killed)
            self.assertEqual(len(said.broken), expected, said.broken)


class OwnChecksTest(CommandCase):
    def test_a_part_for_the_cpu(self):
        argv = ("--quick", "--only", "suites-ranks-per-gpu,memory-back", str(self.out))
        self.assertEqual(self.run_command(*argv, own_checks=True), 0, self.stdout + self.stderr)
        self.assertEqual(self.found["suites-ranks-per-gpu"]["status"], "passed")
        self.assertEqual(self.found["memory-back"]["why"], "there is no GPU")

    def test_each_says_what_it_is(self):
        names = []
        for path in sorted((ROOT / "benchmarks" / "gpu" / "checks").glob("*.py")):
            source = path.read_text()
            names.append(path.stem.replace("_", "-"))
            self.assertRegex(source, r'^""".+', path.name)
            self.assertRegex(source, r"(?m)^ORDER = \d+$", path.name)
            self.assertRegex(source, r"(?m)^LIMIT = \d+$", path.name)
            self.assertRegex(source, r"(?m)^def check\(c\):$", path.name)
            compile(source, path.name, "exec")
        for name in ("fork-survives", "suites-one-rank", "suites-ranks-per-gpu", "memory-back", "run-test", "launch"):
            self.assertIn(name, names)


if __name__ == "__main__":
    unittest.main()
