"""The tiers of our tests follow from what they cost, and a recorded cost is what a test and its processes compute."""

import ast
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from kit.files import subject

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
sys.path.append(str(ROOT / "test"))

import cost_recorder  # noqa: E402
import tiers  # noqa: E402
from core_tests import CORE, OURS  # noqa: E402
from slow_tests import is_slow  # noqa: E402
from tiers import Measured, record, tier_of  # noqa: E402

CHEAP, COSTLY, NEW = (f"{OURS}test_tiers.py::A::test_{name}" for name in ("cheap", "costly", "new"))
SLOW = f"{OURS}launch/test_soak.py::SoakTest::test_nothing_accumulates"
COSTS = {CHEAP: 0.9, COSTLY: 1.1, SLOW: 0.1}


def passed(seconds):
    return Measured(seconds, "passed")


class TierTest(unittest.TestCase):
    def test_by_cost(self):
        self.assertEqual([tier_of(f"test/{name}", COSTS) for name in (CHEAP, COSTLY)], ["core", "full"])

    def test_what_has_no_record_is_in_core(self):
        self.assertEqual(tier_of(NEW, COSTS), "core")

    def test_a_row_of_slow_tests_whatever_it_costs(self):
        self.assertEqual(tier_of(SLOW, COSTS), "slow")

    def test_a_mechanism_whatever_it_costs(self):
        with mock.patch.object(tiers, "_core_names", lambda: frozenset([COSTLY])):
            self.assertEqual(tier_of(COSTLY, COSTS), "core")
            self.assertEqual(tiers.outgrown({COSTLY: passed(90.0)}, COSTS), [])


class CoreTestsTest(unittest.TestCase):
    def test_each_row_is_a_test(self):
        for mechanism, name in CORE.items():
            with self.subTest(mechanism):
                file, *owners, test = name.partition("[")[0].split("::")
                body = ast.parse((ROOT / "test" / file).read_text()).body
                for owner in owners:
                    (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
                self.assertTrue(any(isinstance(node, ast.FunctionDef) and node.name == test for node in body), name)

    def test_no_test_stands_for_two_mechanisms(self):
        self.assertEqual(len(CORE), len(set(CORE.values())))

    def test_a_row_of_a_slow_class(self):
        """One test of the class is in `core`, the others stay slow."""
        row = next(name for name in CORE.values() if is_slow(name))
        self.assertEqual([tier_of(name, {row: 9.0}) for name in (row, f"{row}_too")], ["core", "slow"])


class RecordTest(unittest.TestCase):
    def test_small_differences_change_nothing(self):
        after = record({CHEAP: passed(1.05), COSTLY: passed(1.3)}, COSTS)
        self.assertEqual(after, COSTS)

    def test_others(self):
        after = record({CHEAP: passed(1.26), NEW: passed(3.04)}, COSTS)
        self.assertEqual(after, {**COSTS, CHEAP: 1.3, NEW: 3.0})

    def test_outcomes_that_say_nothing_about_the_cost(self):
        unknown = {CHEAP: Measured(9.0, "failed"), COSTLY: Measured(0.0, "skipped"), NEW: Measured(9.0, "failed")}
        self.assertEqual(record(unknown, COSTS), COSTS)
        self.assertEqual(record({NEW: Measured(0.0, "skipped")}, COSTS)[NEW], 0.0)

    def test_tests_that_are_gone(self):
        gone = f"{OURS}test_gone.py::A::test_a"
        self.assertNotIn(gone, record({}, {gone: 1.0}))
        self.assertEqual(record({NEW: passed(1.0)}, COSTS, whole=True), {NEW: 1.0})

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "costs.tsv")
            tiers.write_costs(COSTS, file)
            self.assertEqual(tiers.read_costs(file), COSTS)
            file.write_text(f"3.00\tfailed\ttest/{CHEAP}\n0.80\tpassed\ttest/{CHEAP}\n0.90\tpassed\ttest/{CHEAP}\n2.0")
            self.assertEqual(tiers.read_measured([file]), {CHEAP: passed(0.8)})

    def test_every_row_has_a_file(self):
        """`record` leaves out the tests of files that are gone."""
        self.assertEqual(
            [name for name in tiers.read_costs() if not (ROOT / "test" / name.partition("::")[0]).exists()], []
        )


class CheckTest(unittest.TestCase):
    def names(self, measured, costs=COSTS):
        return [test.name for test in tiers.outgrown(measured, costs)]

    def test_within_the_tolerance(self):
        self.assertEqual(self.names({CHEAP: passed(1.9), COSTLY: passed(100.0), SLOW: passed(999.0)}), [])

    def test_outgrown(self):
        measured = {CHEAP: passed(2.1), COSTLY: passed(121.0), NEW: passed(9.0)}
        self.assertEqual(self.names(measured), [NEW, CHEAP, COSTLY])
        lines, fails = tiers._describe_check(measured, COSTS)
        self.assertTrue(fails)
        self.assertIn(f"  python -m pytest --record-costs build/costs.tsv test/{NEW} test/{CHEAP}", lines)
        self.assertIn("  python test/tiers.py record build/costs.tsv", lines)

    def test_new_tests_are_named(self):
        lines, fails = tiers._describe_check({NEW: passed(0.1)}, COSTS)
        self.assertIn(f"  {NEW}", lines)
        self.assertFalse(fails)

    def test_a_slower_machine(self):
        others = {f"x.py::test_{number}": 0.5 for number in range(20)}
        measured = {CHEAP: passed(2.6), **{name: passed(0.7) for name in others}}
        self.assertEqual(self.names(measured, {**COSTS, **others}), [])
        self.assertEqual(self.names({**measured, CHEAP: passed(2.9)}, {**COSTS, **others}), [CHEAP])

    def test_a_faster_machine_has_the_same_bars(self):
        others = {f"x.py::test_{number}": 0.5 for number in range(20)}
        measured = {CHEAP: passed(1.9), **{name: passed(0.1) for name in others}}
        self.assertEqual(self.names(measured, {**COSTS, **others}), [])


PROGRAM = subject(__file__, "costly_programs.py")


class RecorderTest(unittest.TestCase):
    def measured(self, *words):
        """What the recorder says of the tests of the program, by their names."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "test_it.py").write_text(PROGRAM)
            Path(folder, "conftest.py").write_text(
                f"import sys; sys.path.append({str(ROOT / 'test')!r})\n"
                "from cost_recorder import pytest_addoption, start_recording\n"
                "def pytest_configure(config):\n    start_recording(config)\n"
            )
            environ = {**os.environ, "CI_COSTS": f"{folder}/out/costs.tsv"}
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, "test_it.py"]
            subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL)
            results = tiers.read_measured([Path(folder, "out", "costs.tsv")])
        return {name.partition("::test_")[2]: result for name, result in results.items()}

    def test_what_is_recorded(self):
        measured = self.measured("-p", "no:xdist")
        for name in ("itself", "child", "orphan_computes"):
            with self.subTest(name):
                self.assertGreaterEqual(measured[name].seconds, 0.28)
        for name in ("nothing", "waits", "orphan_ends", "skips"):
            with self.subTest(name):
                self.assertLess(measured[name].seconds, 0.25)
        outcomes = {name: result.outcome for name, result in measured.items() if result.outcome != "passed"}
        self.assertEqual(outcomes, {"skips": "skipped", "fails": "failed"})

    def test_workers(self):
        measured = self.measured("-n", "2", "--dist", "loadfile")
        self.assertEqual(len(measured), 9)
        self.assertGreaterEqual(measured["child"].seconds, 0.28)

    def test_a_process_that_has_gone(self):
        self.assertIsNone(cost_recorder.read_process(2**30))
        own = cost_recorder.read_process(os.getpid())
        self.assertEqual(own.parent, os.getppid())


class CommandsTest(unittest.TestCase):
    def test_the_three_commands_run_everything(self):
        """Each runs one tier; in all else they are the same."""
        pages = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
        command = r"<!-- command: {} -->\n```\n.*(\.venv/bin/python -m pytest .*) -m (.*)\n"
        found = [re.findall(command.format(name), pages) for name in ("test", "full", "slow")]
        self.assertEqual([len(commands) for commands in found], [1, 1, 1])
        self.assertEqual([commands[0][1] for commands in found], list(tiers.TIERS))
        self.assertEqual(len({commands[0][0] for commands in found}), 1)


if __name__ == "__main__":
    unittest.main()
