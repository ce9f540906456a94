"""The fake accelerator itself, as pytest and the runner have it. The first test builds the library: 20 CPU seconds.

A pytest run gets the device after torch is imported, from a server, or with it: test_properties_and_header has both. A
program of its own, such as the runner, gets it in a new interpreter.
"""

import functools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import Any

import pytest
from kit.files import FolderCase, subject
from kit.processes import ROOT, clean_environ, end, run_python
from kit.pytest_runs import PLUGIN, PytestRun, run_pytest
from kit.warm import run_cold, run_warm

from torch_testing_ext._machine.device_locks import LEASE_FOLDER
from torch_testing_ext._machine.fake_accelerator import COUNT, LATE_STREAMS, MASK, building
from torch_testing_ext.common_utils import run_tests

pytestmark = pytest.mark.slow

README = ROOT / "README.md"
OPTIONS = ("--fake-accelerators", "4")


def source_of(name: str) -> str:
    return subject(__file__, name)


def names_of_tests(source: str) -> list[str]:
    return re.findall(r"^def (test_\w+)", source, re.MULTILINE)


def run_subject(name: str, *options: str, **environ: str) -> PytestRun:
    return run_pytest({f"test_{name}": source_of(name)}, *OPTIONS, *options, **environ)


@functools.cache
def compiler_is_missing() -> str:
    """Why nothing can be built; empty if it can."""
    try:
        building.find_compiler()
        building.headers_of_python()
    except building.FakeAcceleratorError as error:
        return str(error)
    return ""


class DeviceCase(FolderCase):
    def setUp(self) -> None:
        super().setUp()
        if why := compiler_is_missing():
            self.skipTest(why)

    def check_all_pass(self, name: str, **environ: str) -> None:
        """Every test of a subject runs and passes."""
        run = run_subject(name, **environ)
        failed = {test: run.messages[test] for test, outcome in run.outcomes.items() if outcome != "passed"}
        self.assertEqual(failed, {}, run.text + run.errors)
        ran = {test.partition("[")[0] for test in run.outcomes}
        self.assertEqual(ran, {*names_of_tests(source_of(name))}, run.text + run.errors)


class PytestTest(DeviceCase):
    def test_tensors(self) -> None:
        self.check_all_pass("tensors.py")

    def test_forks(self) -> None:
        self.check_all_pass("forks.py")

    def test_training(self) -> None:
        """In 2 and 4 ranks, with the numbers of the CPU."""
        self.check_all_pass("training.py")

    def test_late_streams(self) -> None:
        self.check_all_pass("late_streams.py", **{LATE_STREAMS: "1"})

    def test_verdicts_on_collectives(self) -> None:
        """Those of the CPU, from the same planted faults."""
        tests = ROOT / "test" / "torch_testing_ext"
        run = run_subject("verdicts.py", "-o", f"pythonpath={tests} {tests / '_collectives'}")
        failed = {name: run.messages[name] for name, outcome in run.outcomes.items() if outcome != "passed"}
        self.assertEqual(failed, {}, run.text + run.errors)
        self.assertEqual(len(run.outcomes), source_of("verdicts.py").count("def test_"))

    def test_faults(self) -> None:
        """Each fails, with the line of the fault in its failure."""
        source = source_of("faults.py")
        run = run_subject("faults.py", "--tb=short")  # pytest parses large files of torch for each style
        names = names_of_tests(source)
        self.assertEqual({name: run.outcomes.get(name) for name in names}, dict.fromkeys(names, "failed"), run.text)
        bodies = re.split(r"^def (?=test_)", source, flags=re.MULTILINE)
        for number, name in enumerate(names):
            line = (
                "".join(bodies[: number + 1]).count("\n") + bodies[number + 1].partition("# fault")[0].count("\n") + 1
            )
            with self.subTest(test=name):
                self.assertIn(f"test_faults.py:{line}", run.messages[name])

    def test_properties_and_header(self) -> None:
        """By the option and by the variable."""
        report = self.root / "junit.xml"
        source = "import torch\ndef test_count(): assert torch.accelerator.device_count() == 4\n"
        self.write("test_count.py", source)
        for run, options, environ in ((run_cold, OPTIONS, {}), (run_warm, (), {COUNT: "4"})):
            words = ("-m", "pytest", *PLUGIN, *options, f"--junitxml={report}", str(self.root))
            done = run(*words, cwd=self.root, env=clean_environ(**environ))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("fake accelerators: 4, computed by the CPU", done.stdout)
            properties = [each.attrib for each in ElementTree.parse(report).iter("property")]
            self.assertIn({"name": "fake_accelerators", "value": "4"}, properties)

    def test_refusals(self) -> None:
        self.write("test_nothing.py")
        for options, environ, text in (
            (("--fake-accelerators", "0"), {}, "'0' is not a whole number of at least 1"),
            (("--fake-accelerators", "1.5"), {}, "'1.5' is not a whole number of at least 1"),
            (OPTIONS, {MASK: "7"}, "names 7, which is not one of the 4 fake accelerators"),
            (OPTIONS, {"CXX": "no-compiler", "XDG_CACHE_HOME": str(self.root)}, "no-compiler, which CXX names"),
        ):
            with self.subTest(refused=text):
                done = run_python("-m", "pytest", *options, self.root, **environ)
                self.assertEqual(done.returncode, 4)
                (line,) = (line for line in done.stderr.splitlines() if "--fake-accelerators: " in line)
                self.assertIn(text, line)


class RunnerTest(DeviceCase):
    def run_runner(self, count: int, name: str, *words: object, code: int = 0, **environ: str) -> str:
        """Run a file of the folder, with so many devices; return what the console shows. Its results are in a file."""
        command = (
            f"import os; os.chdir({str(self.root)!r}); from torch_testing_ext.runner.cli import console; "
            "raise SystemExit(console())"
        )
        options = (f"--fake-accelerators={count}", "--warm=off", "--timeout=60", "--results=results.json")
        done = run_python("-c", command, *options, *words, name, **environ)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout

    def results(self) -> dict[str, dict[str, Any]]:
        """The results of the run, by the tests' names."""
        tests = json.loads((self.root / "results.json").read_text())["tests"]
        return {test["id"].rpartition("::")[2]: test for test in tests}

    def run_subject(self, count: int, name: str, *words: object, code: int = 0, **environ: str) -> str:
        """Run a subject as a file of tests."""
        self.write(f"test_{name}", source_of(name))
        return self.run_runner(count, f"test_{name}", *words, code=code, **environ)

    def test_the_readmes_example_has_a_device_for_each_rank(self) -> None:
        example = re.search(
            r"```python\n(# file: test_first.py\n.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
        )
        assert example is not None
        more = '    assert (str(tensor.device), dist_env.backend) == (f"fakeacc:{dist_env.rank}", "fakeccl")\n'
        self.write("test_first.py", example[1] + more)
        junit = self.root / "junit.xml"
        shown = self.run_runner(4, "test_first.py", f"--junitxml={junit}")
        self.assertIn("1 test from 1 file on 4 devices", shown)
        self.assertIn("fake accelerators: 4, computed by the CPU", shown)
        (test,) = self.results().values()
        self.assertEqual(test["outcome"], "passed")
        self.assertIn("4 fakeacc devices: 0, 1, 2, 3 (Fake accelerator)", junit.read_text())

    def test_leases(self) -> None:
        for fifo in ("of_first", "of_second"):
            os.mkfifo(self.root / fifo)
        shown = self.run_subject(3, "leases.py", "-j8", "--ranks-per-gpu=2", **{MASK: "0,2"})
        outcomes = {name: test["outcome"] for name, test in self.results().items()}
        names = re.findall(r"def (test_\w+)", source_of("leases.py"))
        expected = dict.fromkeys(names, "passed") | {"test_more_than_ranks_can_share": "skipped"}
        self.assertEqual(outcomes, expected, shown)

    def test_a_lease_ends_when_the_memory_is_back(self) -> None:
        for fifo in ("left", "seen"):
            os.mkfifo(self.root / fifo)
        shown = self.run_subject(1, "memory.py", "-j3", "-k", "ReturnTest")
        self.assertIn("3 passed, 0 failed", shown)

    def test_a_device_whose_memory_does_not_come_back(self) -> None:
        shown = self.run_subject(2, "memory.py", "-j1", "-k", "KeepTest")
        outcomes = {name[5]: test["outcome"] for name, test in self.results().items()}
        self.assertEqual(outcomes, {"a": "leaked", "b": "passed"}, shown)
        self.assertRegex(shown, r"device \d still had 300 MiB more in use than before \(held by pid \d+ \(.*python")
        self.assertIn("it is not used again in this run", shown)
        self.assertRegex(shown, "left memory of a device in use:\n *devices [01],[01] .*test_a_keeps_it")


NO_TRITON = "inductor needs Triton, and support for it here"
COMPILED_FOR_DEVICES = [f"test_compile_{name}" for name in ("gpu", "gpu_ac", "bf16", "fp16", "backward_only")]


@pytest.mark.nightly
class SuitesTest(DeviceCase):
    """The suites on four devices: each test ends as on the CPU, where all pass, or is listed here with the reason."""

    def check_suites(self, *names: str, with_devices: int, skipped: Mapping[str, str] | None = None) -> None:
        """`with_devices`: how many tests lease some. `skipped`: the reasons, by the tests' names."""
        results = self.root / "results.json"
        words = ("--warm=off", f"--cache={self.root}/cache", f"--results={results}", *names)
        done = run_python(ROOT / "run_test.py", *OPTIONS, *words)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        tests = json.loads(results.read_text())["tests"]
        others = {
            test["id"].rpartition("::")[2]: test["attempts"][-1]["message"]
            for test in tests
            if test["outcome"] != "passed"
        }
        self.assertEqual(others, dict(skipped or {}))
        leased = [test["id"] for test in tests if test["attempts"][-1]["devices"]]
        self.assertEqual(len(leased), with_devices, leased)

    def test_of_models(self) -> None:
        names = ("test_data_parallel", "test_fsdp_tp_integration", "test_fully_shard_tp_integration")
        self.check_suites(*names, "test_ddp_2d_parallel", "test_tp_examples", with_devices=87)

    def test_of_compiled_models(self) -> None:
        """The compiler has nothing for this device."""
        skipped = dict.fromkeys(COMPILED_FOR_DEVICES, NO_TRITON)
        self.check_suites("test_replicate_with_compiler", with_devices=len(skipped), skipped=skipped)

    def test_of_properties(self) -> None:
        """They are on the CPU, whatever there is."""
        files = sorted((ROOT / "test" / "distributed").rglob("test_*_properties.py"))
        self.assertEqual(len(files), 10)
        self.check_suites(*(file.stem for file in files), with_devices=0)


class DirectTest(DeviceCase):
    def test_a_file_that_is_run_directly(self) -> None:
        file = self.write(
            "direct.py", "import torch\nimport torch_testing_ext\nprint(torch.accelerator.device_count())\n"
        )
        done = run_python(file, **{COUNT: "3"})
        self.assertEqual((done.stdout, done.returncode), ("3\n", 0), done.stderr)

    def test_two_programs_do_not_use_a_device_at_once(self) -> None:
        """The second says for whom it waits, and runs when the first has ended."""
        for fifo in ("is_held", "let_go"):
            os.mkfifo(self.root / fifo)
        first = self.start("holds")
        self.assertEqual((self.root / "is_held").read_text(), "fake-0000")
        second = self.start("passes")
        assert second.stderr is not None
        waiting = next(line for line in second.stderr if "waiting" in line)
        self.assertIn(f"waiting for 1 of 1 devices, used by pid {first.pid}: spawn(holds)", waiting)
        self.assertFalse((self.root / "has_run").exists())
        (self.root / "let_go").write_text("")
        for program in (first, second):
            _, errors = program.communicate()
            self.assertEqual(program.returncode, 0, errors)
        self.assertTrue((self.root / "has_run").exists())

    def test_runs_have_devices_of_their_own(self) -> None:
        """One does not wait for another."""
        for fifo in ("is_held", "let_go"):
            os.mkfifo(self.root / fifo)
        first = self.start("holds", **{LEASE_FOLDER: ""})
        self.assertEqual((self.root / "is_held").read_text(), "fake-0000")
        second = self.start("passes", **{LEASE_FOLDER: ""})
        _, errors = second.communicate()
        self.assertEqual(second.returncode, 0, errors)
        (self.root / "let_go").write_text("")
        first.communicate()
        self.assertEqual(first.returncode, 0)

    def start(self, function: str, **environ: str) -> subprocess.Popen[str]:
        """Start a program whose ranks lease the only device."""
        file = self.write("program.py", source_of("program.py"))
        process = subprocess.Popen(
            [sys.executable, file, function],
            cwd=self.root,
            env=clean_environ(
                **{COUNT: "1", LEASE_FOLDER: str(self.root / "leases"), "PYTHONPATH": str(ROOT), **environ}
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(end, process)
        return process

    def test_nothing_changes_without_the_option(self) -> None:
        file = self.write("direct.py", "import torch, torch_testing_ext\nprint(hasattr(torch, 'fakeacc'))\n")
        environ = {name: value for name, value in os.environ.items() if name == "PATH"}
        self.assertEqual(run_python(file, **environ).stdout, "False\n")


if __name__ == "__main__":
    run_tests()
