"""Results of real runners, beside the source of a suite with every kind of skip and of generated test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.files import FolderCase, subject

from torch_testing_ext.runner.run_files.census import HoleReason, take_census
from torch_testing_ext.runner.run_files.definitions import find_definitions
from torch_testing_ext.runner.run_files.reading import read_results

SUBJECTS = Path(__file__).with_name("subjects")
WITHOUT_PARAMETERS = f"test_odd.py::test_empty[{'NOTSET' if pytest.version_tuple >= (8,) else 'x0'}]"
# The reason of each hole that pytest leaves, and what the census says of it: "LINE(...)" is the line that has the text.
HOLES = {
    "checks_more.py::test_never": (HoleReason.NEVER_COLLECTED, "no pattern of python_files matches its name"),
    "ignored/test_ign.py::test_ign": (HoleReason.NEVER_COLLECTED, "tests/conftest.py:1 ignores it"),
    "test_broken.py::test_x": (
        HoleReason.NEVER_COLLECTED,
        "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
    ),
    "test_import_skip.py::T::test_x": (
        HoleReason.AT_IMPORT,
        "tests/test_import_skip.py:2: could not import 'nothere'",
    ),
    "test_module_skip.py::test_x": (HoleReason.AT_IMPORT, "tests/test_module_skip.py:2: no cluster here"),
    "test_unittest_module.py::T::test_x": (HoleReason.AT_IMPORT, "tests/test_unittest_module.py:2: whole module"),
    "test_mark_module.py::test_x": (HoleReason.BY_HAND, "tests/test_mark_module.py:2: needs 8 GPUs"),
    "test_odd.py::SubTest::test_skips_one_subtest": (HoleReason.BY_HAND, 'LINE(skipTest("one): one only'),
    "test_odd.py::SkippedClass::test_a": (HoleReason.BY_HAND, "LINE(@unittest.skip): whole class"),
    "test_odd.py::SkippedClass::test_b": (HoleReason.BY_HAND, "LINE(@unittest.skip): whole class"),
    "test_odd.py::TestMarked::test_c": (HoleReason.BY_HAND, "LINE(@pytest.mark.skipif): class mark"),
    "test_odd.py::TestSetupSkips::test_in_setup": (
        HoleReason.BY_HAND,
        'LINE(self.skipTest("requires): requires 4 GPUs',
    ),
    "test_odd.py::TestSetupClass::test_in_setup_class": (HoleReason.BY_HAND, "LINE(raise unittest.SkipTest): no NCCL"),
    "test_odd.py::test_param[2]": (HoleReason.BY_HAND, "broken"),
    "test_odd.py::test_param[3]": (HoleReason.NOT_JUDGED, "xfail(run=False)"),
    WITHOUT_PARAMETERS: (
        HoleReason.BY_HAND,
        "got empty parameter set",
    ),
    "test_odd.py::test_fixture": (HoleReason.NEED, "requires a GPU"),
    "test_odd.py::test_named_mark": (HoleReason.NEED, "test requires a GPU"),
    "test_odd.py::test_slow": (HoleReason.NOT_SELECTED, "no results have it"),
}
if pytest.version_tuple < (8, 4):  # later ones fail such a test
    HOLES["test_odd.py::test_async"] = (HoleReason.BY_HAND, "async def function and no async plugin installed")


class RealRunnersTest(FolderCase):
    def setUp(self):
        super().setUp()
        self.suite = subject(__file__, "strange_suite.py")
        x = "def test_x(): pass\n"
        of_class = "class T(unittest.TestCase):\n    def test_x(self): pass\n"
        for name, source in {
            "test_odd.py": self.suite,
            "test_module_skip.py": f'import pytest\npytest.skip("no cluster here", allow_module_level=True)\n{x}',
            "test_import_skip.py": f'import pytest\npytest.importorskip("nothere")\n{of_class}',
            "test_mark_module.py": f'import pytest\npytestmark = pytest.mark.skipif(True, reason="needs 8 GPUs")\n{x}',
            "test_unittest_module.py": f'import unittest\nraise unittest.SkipTest("whole module")\n{of_class}',
            "test_broken.py": f"import nowhere_to_be_found\n{x}",
            "checks_more.py": "def test_never(): pass\n",
            "ignored/test_ign.py": "def test_ign(): pass\n",
            "conftest.py": 'collect_ignore_glob = ["ignored/*"]\n',
            "sub/test_odd.py": f"import unittest\n{of_class.replace('T(', 'SubTest(').replace('test_x', 'test_sub')}",
            "__init__.py": "",
            "sub/__init__.py": "",
        }.items():
            self.write(f"tests/{name}", source)
        self.write("pytest.ini", "[pytest]\nmarkers = slow\n")

    def census(self, *files):
        read = [results for file in files for results in read_results(file)]
        return take_census(find_definitions(self.root, [self.root / "tests"]), read)

    def pytest(self, *words):
        """The JUnit file of a run in an interpreter of its own: the suite is one of strangers, without this plugin."""
        file = self.root / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "tests", f"--junitxml={file}", "-m", "not slow", *words]
        environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        subprocess.run(command, cwd=self.root, env=environ, capture_output=True, check=False)
        return file

    def expected(self):
        lines = self.suite.splitlines()

        def place(match):
            number = next(number for number, line in enumerate(lines, 1) if match[1] in line)
            return f"tests/test_odd.py:{number}"

        return {name: (why, re.sub(r"LINE\((.*?)\)(?=: )", place, detail)) for name, (why, detail) in HOLES.items()}

    def assertHoles(self, census):
        holes = {hole.test.removeprefix("tests/"): hole for hole in census.holes}
        expected = self.expected()
        self.assertEqual(holes.keys(), expected.keys())
        for name, (why, detail) in expected.items():
            with self.subTest(name):
                self.assertIs(holes[name].reason, why)
                self.assertIn(detail, holes[name].detail)

    def test_pytest(self):
        census = self.census(self.pytest("--continue-on-collection-errors"))
        self.assertHoles(census)
        names = [name.rpartition("::")[2] for name in census.strangers]
        self.assertEqual(sorted(names), ["test_gen_1", "test_gen_2"])

    def test_xdist(self):
        self.assertHoles(self.census(self.pytest("--continue-on-collection-errors", "-p", "xdist", "-n", "1")))

    def test_a_collection_that_breaks_off(self):
        """Only the broken file is known to be broken; the others have no results."""
        holes = {hole.test: hole for hole in self.census(self.pytest()).holes}
        self.assertIn("ModuleNotFoundError", holes["tests/test_broken.py::test_x"].detail)
        self.assertIn("no results have a test of this file", holes["tests/test_odd.py::test_slow"].detail)

    def test_unittest_xml_reporting(self):
        """A class or file that cannot begin stands for its tests, a subtest for the test that it is in."""
        census = self.census(SUBJECTS / "unittest_xml_reporting.xml")
        holes = {hole.test.removeprefix("tests/"): (hole.reason, hole.detail) for hole in census.holes}
        expected = self.expected()
        for name in (
            *("test_odd.py::SkippedClass::test_a", "test_odd.py::SubTest::test_skips_one_subtest"),
            *("test_odd.py::TestSetupSkips::test_in_setup", "test_odd.py::TestSetupClass::test_in_setup_class"),
            *("test_broken.py::test_x", "test_unittest_module.py::T::test_x"),
        ):
            with self.subTest(name):
                self.assertIs(holes[name][0], expected[name][0])
                self.assertIn(expected[name][1], holes[name][1])
        for seen in (
            "test_odd.py::SubTest::test_sub",
            "sub/test_odd.py::SubTest::test_sub",
            "test_odd.py::Base::test_mixin",
        ):
            self.assertNotIn(seen, holes)
        self.assertEqual({name.rpartition("::")[2] for name in census.strangers}, {"test_gen_1", "test_gen_2"})
