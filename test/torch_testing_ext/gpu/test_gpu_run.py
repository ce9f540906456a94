"""The command that makes all checks on a GPU, benchmarks/gpu/run, with made-up checks and its own on the CPU.

What its checks find on a GPU is not tested here: that is what they are for.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

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

    def test_all_checks_of_one_gpu_fit(self):
        on_one = [plan.limit for plan in main.choose(self.plans, "") if plan.gpus == 1]
        self.assertLessEqual(sum(on_one), 60 * main.MINUTES)

    def test_checks_for_two_gpus_are_named_on_one(self):
        run = self.run_with(1, 100.0)
        whys = {plan.name: run.why_not(plan) for plan in self.plans if run.why_not(plan)}
        for name in ("two-gpus", "hang-sources"):
            self.assertEqual(whys[name], "it takes 2 GPUs, and there is 1")
        self.assertEqual([plan for plan in self.plans if self.run_with(2, 100.0).why_not(plan)], [])

    def test_checks_that_only_measure_run_if_they_are_named(self):
        usual = {plan.name for plan in main.choose(self.plans, "")}
        self.assertEqual({plan.name for plan in self.plans} - usual, {"spmd-fx", "spmd-inductor"})
        self.assertEqual([plan.name for plan in main.choose(self.plans, "spmd-fx")], ["spmd-fx"])

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
