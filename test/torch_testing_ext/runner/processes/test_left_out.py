"""Tests that the hooks of a project leave out: a warning names them, also where pytest counts no deselection."""

import textwrap

import pytest
from kit.project import Project

from torch_testing_ext._process.words import each_once
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.processes.file_processes import NOT_LISTED

TESTS = """
import unittest, pytest
def test_kept(): pass
def test_drop(): assert 0
class TestPlain:
    def test_drop(self): assert 0
    def test_kept(self): pass
class DropCase(unittest.TestCase):
    def test_of_unittest(self): self.fail()
@pytest.mark.parametrize("number", [])
def test_without_parameters(number): assert 0
def helper_of_drop(): assert 0
class TestNone:
    __test__ = False
    def test_drop(self): assert 0
"""
# pytest 8 gave it another name.
WITHOUT_PARAMETERS = f"test_without_parameters[{'NOTSET' if pytest.version_tuple >= (8,) else 'number0'}]"


def setUpModule():
    global PROJECT
    PROJECT = Project()
    PROJECT.write("[pytest]\ndist_world_sze = 3\nunknown_here = 1\nconsole_output_style = count\n", "pytest.ini")


def tearDownModule():
    PROJECT.close()


class TestSettings(TestCase):
    def test_unknown_settings(self):
        """One warning for all files, as pytest has it; its own would be lost with the process of the file."""
        files = [PROJECT.write("def test_x(): pass\n", f"test_{name}.py") for name in "ab"]
        warnings = PROJECT.preloaded_server.discover(files).warnings
        misspelt, unknown = sorted(each_once(warnings))
        self.assertRegex(misspelt, "^pytest has no setting dist_world_sze. Did you mean: dist_world_size")
        self.assertEqual(unknown, "pytest has no setting unknown_here.")


class TestLeftOut(TestCase):
    def found(self, conftest):
        """The names of the tests in a folder with this conftest.py, and the warnings."""
        folder = f"folder{self._testMethodName}"
        PROJECT.write(textwrap.dedent(conftest), f"{folder}/conftest.py")
        file = PROJECT.write(TESTS, f"{folder}/{self._testMethodName}.py")
        discovery = PROJECT.preloaded_server.discover([file])
        self.assertEqual((discovery.broken, discovery.not_run), ((), ()))
        warnings = [warning.replace(file, "FILE") for warning in discovery.warnings if file in warning]
        return [test.id.dotted for test in discovery.tests], warnings

    def test_by_another_list_of_items(self):
        tests, warnings = self.found(
            """
            def pytest_collection_modifyitems(items):
                items[:] = [item for item in items if "rop" not in item.nodeid]
            """
        )
        self.assertEqual(tests, ["test_kept", "TestPlain.test_kept", WITHOUT_PARAMETERS])
        dropped = "test_drop, TestPlain.test_drop, DropCase.test_of_unittest"
        self.assertEqual(warnings, [f"pytest leaves out 3 of the tests in FILE, by its options or hooks: {dropped}"])

    def test_by_no_item(self):
        tests, warnings = self.found(
            """
            def pytest_pycollect_makeitem(name):
                return [] if "rop" in name else None
            """
        )
        self.assertEqual(tests, ["test_kept", "TestPlain.test_kept", WITHOUT_PARAMETERS])
        dropped = "test_drop, DropCase, TestPlain.test_drop"
        self.assertEqual(warnings, [f"pytest leaves out 3 of the tests in FILE, by its options or hooks: {dropped}"])

    def test_what_pytest_counts_is_named_once(self):
        _, warnings = self.found(
            """
            def pytest_collection_modifyitems(config, items):
                config.hook.pytest_deselected(items=[items.pop(0)])
            """
        )
        self.assertEqual(warnings, ["pytest leaves out 1 of the tests in FILE, by its options or hooks: test_kept"])

    def test_no_false_alarm(self):
        tests, warnings = self.found(
            """
            import pytest
            def pytest_collection_modifyitems(items):
                items[:] = list(reversed(items))
                for item in items: item.add_marker(pytest.mark.skip)
            def pytest_pycollect_makeitem(name, obj):
                return [] if name == "helper_of_drop" or isinstance(obj, int) else None
            """
        )
        self.assertEqual(len(tests), 6)
        self.assertEqual(warnings, [])

    def test_a_file_of_which_nothing_is_known(self):
        """Whatever has lost its list."""
        file = PROJECT.preloaded_server.file("never_opened.py", 0)
        (broken,) = PROJECT.preloaded_server._discovery([file]).broken
        self.assertEqual((str(broken.test.id), broken.said.partition("\n")[0]), ("never_opened.py", NOT_LISTED))


if __name__ == "__main__":
    run_tests()
