"""The tiers of our tests follow from what they cost, and a recorded cost is what a test and its processes compute."""

import ast
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from kit.files import subject

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
sys.path.append(str(ROOT / "test"))

import cost_recorder  # noqa: E402
import tiers  # noqa: E402
from core_tests import CORE, OURS  # noqa: E402
from cost_recorder import SHARED  # noqa: E402
from slow_tests import is_slow  # noqa: E402
from tiers import Costs, Measured, record, tier_of  # noqa: E402

CHEAP, COSTLY, NEW = (f"{OURS}test_tiers.py::A::test_{name}" for name in ("cheap", "costly", "new"))
SLOW = f"{OURS}launch/test_soak.py::SoakTest::test_nothing_accumulates"
ROWS = {CHEAP: 0.9, COSTLY: 1.1, SLOW: 0.1}
COSTS = Costs(ROWS)
# Two classes of a module, of which one shares something, as does the module.
MODULE = f"{OURS}test_tiers.py"
SHARING = {
    f"{MODULE}::A::test_a": 0.2,
    f"{MODULE}::A::test_b[x::y]": 0.4,
    f"{MODULE}::A::{SHARED}": 1.0,
    f"{MODULE}::B::test_c": 0.1,
    f"{MODULE}::test_d": 0.0,
    f"{MODULE}::{SHARED}": 0.8,
}


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

    def test_what_tests_share_counts_in_equal_parts(self):
        costs = Costs(SHARING)
        expected = {"A::test_a": 0.9, "A::test_b[x::y]": 1.1, "B::test_c": 0.3, "test_d": 0.2, "A::test_new": 0.7}
        for name, seconds in expected.items():
            self.assertAlmostEqual(costs.of(f"{MODULE}::{name}"), seconds, msg=name)
        self.assertEqual([tier_of(f"{MODULE}::A::test_{name}", costs) for name in ("a", "b[x::y]")], ["core", "full"])
        self.assertAlmostEqual(sum(costs.of(name) for name in costs.tests), sum(SHARING.values()))

    def test_a_mechanism_pays_for_what_it_shares(self):
        first, second, third = (f"{MODULE}::{name}" for name in ("A::test_a", "A::test_b[x::y]", "B::test_c"))
        with mock.patch.object(tiers, "_core_names", lambda: frozenset([first])):
            costs = Costs(SHARING)
            self.assertEqual([round(costs.of(name), 1) for name in (first, second, third)], [2.0, 0.4, 0.1])
            self.assertEqual([tier_of(name, costs) for name in (first, second)], ["core", "core"])


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
        self.assertEqual([tier_of(name, Costs({row: 9.0})) for name in (row, f"{row}_too")], ["core", "slow"])

    def test_every_row_is_needed(self):
        self.assertEqual(tiers.needless_rows(tiers.read_costs()), [])

    def test_needless_rows(self):
        rows = {"cheap": CHEAP, "costly": COSTLY, "slow": SLOW, "skipped": NEW, "shares": f"{MODULE}::A::test_a"}
        with mock.patch.object(tiers, "CORE", rows):
            self.assertEqual(tiers.needless_rows(Costs({**ROWS, CHEAP: 0.4, NEW: 0.0})), ["cheap"])
            self.assertEqual(tiers.needless_rows(Costs({**SHARING, COSTLY: 0.6})), [])


class RecordTest(unittest.TestCase):
    def test_small_differences_change_nothing(self):
        after = record({CHEAP: passed(1.05), COSTLY: passed(1.3)}, ROWS)
        self.assertEqual(after, ROWS)

    def test_others(self):
        after = record({CHEAP: passed(1.26), NEW: passed(3.04)}, ROWS)
        self.assertEqual(after, {**ROWS, CHEAP: 1.3, NEW: 3.0})

    def test_outcomes_that_say_nothing_about_the_cost(self):
        unknown = {CHEAP: Measured(9.0, "failed"), COSTLY: Measured(0.0, "skipped"), NEW: Measured(9.0, "failed")}
        self.assertEqual(record(unknown, ROWS), ROWS)
        self.assertEqual(record({NEW: Measured(0.0, "skipped")}, ROWS)[NEW], 0.0)
        importing = {CHEAP: Measured(9.0, "importing"), NEW: Measured(9.0, "importing")}
        self.assertEqual(record(importing, ROWS), {**ROWS, NEW: 9.0})

    def test_what_is_shared(self):
        row, nothing = f"{MODULE}::A::{SHARED}", f"{MODULE}::{SHARED}"
        self.assertEqual(record({row: passed(2.5), nothing: passed(0.04)}, ROWS), {**ROWS, row: 2.5})
        self.assertEqual(record({row: passed(0.04)}, {**ROWS, row: 2.5}), ROWS)

    def test_tests_that_are_gone(self):
        gone = f"{OURS}test_gone.py::A::test_a"
        self.assertNotIn(gone, record({}, {gone: 1.0}))
        self.assertEqual(record({NEW: passed(1.0)}, ROWS, whole=True), {NEW: 1.0})

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "costs.tsv")
            tiers.write_costs(ROWS, file)
            self.assertEqual(tiers.read_costs(file).rows, ROWS)
            file.write_text(f"3.00\tfailed\ttest/{CHEAP}\n0.80\tpassed\ttest/{CHEAP}\n0.90\tpassed\ttest/{CHEAP}\n2.0")
            self.assertEqual(tiers.read_measured([file]), {CHEAP: passed(0.8)})

    def test_every_row_has_a_file(self):
        """`record` leaves out the tests of files that are gone."""
        self.assertEqual(
            [name for name in tiers.read_costs().rows if not (ROOT / "test" / name.partition("::")[0]).exists()], []
        )


class CheckTest(unittest.TestCase):
    def names(self, measured, rows=ROWS):
        return [test.name for test in tiers.outgrown(measured, Costs(rows))]

    def test_within_the_tolerance(self):
        self.assertEqual(self.names({CHEAP: passed(3.9), COSTLY: passed(200.0), SLOW: passed(999.0)}), [])

    def test_outgrown(self):
        measured = {CHEAP: passed(4.1), COSTLY: passed(241.0), NEW: passed(9.0)}
        self.assertEqual(self.names(measured), [NEW, CHEAP, COSTLY])
        lines, fails = tiers._describe_check(measured, COSTS)
        self.assertTrue(fails)
        self.assertIn(f"  python -m pytest --record-costs build/costs.tsv test/{NEW} test/{CHEAP}", lines)
        self.assertIn("  python test/tiers.py record build/costs.tsv", lines)

    def test_outcomes_that_say_nothing_about_the_cost(self):
        self.assertEqual(self.names({CHEAP: Measured(9.0, "importing"), NEW: Measured(9.0, "failed")}), [])

    def test_what_tests_share(self):
        """Whoever comes first, and whichever tests run: all of the class have outgrown their tier, or none."""
        first, row = f"{MODULE}::A::test_a", f"{MODULE}::A::{SHARED}"
        self.assertEqual(self.names({first: passed(0.2), row: passed(5.6)}, SHARING), [])
        self.assertEqual(self.names({first: passed(0.2), row: passed(8.4)}, SHARING), [first])

    def test_new_tests_are_named(self):
        lines, fails = tiers._describe_check({NEW: passed(0.1), f"{MODULE}::{SHARED}": passed(0.1)}, COSTS)
        self.assertEqual([line for line in lines if line.startswith("  ")], [f"  {NEW}"])
        self.assertFalse(fails)

    def test_a_slower_machine(self):
        others = {f"x.py::test_{number}": 0.5 for number in range(20)}
        measured = {CHEAP: passed(5.4), **{name: passed(0.7) for name in others}}
        self.assertEqual(self.names(measured, {**ROWS, **others}), [])
        self.assertEqual(self.names({**measured, CHEAP: passed(5.8)}, {**ROWS, **others}), [CHEAP])

    def test_a_faster_machine_has_the_same_bars(self):
        others = {f"x.py::test_{number}": 0.5 for number in range(20)}
        measured = {CHEAP: passed(3.9), **{name: passed(0.1) for name in others}}
        self.assertEqual(self.names(measured, {**ROWS, **others}), [])


PROGRAM = subject(__file__, "costly_programs.py")
SHARING_PROGRAM = subject(__file__, "sharing_programs.py")


class RecorderTest(unittest.TestCase):
    def measured(self, *words, program=PROGRAM):
        """What the recorder says of the tests of the program, by their names."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "test_it.py").write_text(program)
            Path(folder, "conftest.py").write_text(
                f"import sys; sys.path.append({str(ROOT / 'test')!r})\n"
                "from cost_recorder import pytest_addoption, start_recording\n"
                "def pytest_configure(config):\n    start_recording(config)\n"
            )
            environ = {**os.environ, "CI_COSTS": f"{folder}/out/costs.tsv"}
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, "test_it.py"]
            subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL)
            results = tiers.read_measured([Path(folder, "out", "costs.tsv")])
        return {name.removeprefix("test_it.py::").removeprefix("test_"): result for name, result in results.items()}

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

    def test_what_is_shared(self):
        """A class and a module pay for what their tests share, not the test that comes first."""
        measured = self.measured("-p", "no:xdist", "-k", "not test_b", program=SHARING_PROGRAM)
        shared = {name: measured.pop(name).seconds for name in list(measured) if SHARED in name}
        self.assertEqual(shared.keys(), {SHARED, f"SharingTest::{SHARED}", f"ServerTest::{SHARED}"})
        self.assertAlmostEqual(shared[f"SharingTest::{SHARED}"], 0.5, delta=0.1)
        self.assertAlmostEqual(shared[SHARED], 0.2, delta=0.1)
        self.assertEqual(measured.keys(), {"SharingTest::test_a", "c", "ServerTest::test_d", "ServerTest::test_e"})
        self.assertLess(max(result.seconds for result in measured.values()), 0.15)
        self.assertEqual({result.outcome for result in measured.values()}, {"passed"})

    def test_what_imports(self):
        names = [f"of_a_package_{number}" for number in range(cost_recorder.MANY_MODULES)]
        origins = {name: f"/x/site-packages/{name}.py" for name in names} | {"ours": "/x/ours.py", "builtin": None}
        modules = {name: SimpleNamespace(__spec__=SimpleNamespace(origin=path)) for name, path in origins.items()}
        with mock.patch.dict(sys.modules, {**modules, "__main__": SimpleNamespace(__spec__=None)}):
            self.assertEqual(cost_recorder.count_installed([*modules, "__main__", "gone"]), len(names))
        program = (
            "def test_few():\n    import xml.dom.minidom\n"
            "def test_many():\n    import torch.testing._internal.common_utils\n"
        )
        outcomes = {name: result.outcome for name, result in self.measured("-p", "no:xdist", program=program).items()}
        self.assertEqual(outcomes, {"few": "passed", "many": "importing"})

    def test_a_process_that_has_gone(self):
        self.assertIsNone(cost_recorder.read_process(2**30))
        own = cost_recorder.read_process(os.getpid())
        self.assertEqual(own.parent, os.getppid())


class CommandsTest(unittest.TestCase):
    def test_the_three_commands_run_everything(self):
        """Each runs one tier, all of it; they differ in the number of workers."""
        pages = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
        command = r"<!-- command: {} -->\n```\n.*\.venv/bin/python -m pytest -n \d --dist worksteal -m (.*)\n"
        found = [re.findall(command.format(name), pages) for name in ("test", "full", "slow")]
        self.assertEqual(found, [[tier] for tier in tiers.TIERS])


if __name__ == "__main__":
    unittest.main()
