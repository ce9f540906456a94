"""A file inside a package is imported as a member of it, in every process; any other file as a program."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from kit.files import subject
from kit.project import Project
from kit.warm import run_warm

import torch_testing_ext
from torch_testing_ext.common_utils import TestCase, run_tests

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
SUBJECT = subject(__file__, "member_of_a_package.py")
MAIN = """
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests
from .helper import VALUE

class RanksTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_ranks(self):
        self.assertEqual(VALUE, {expected})

if __name__ == "__main__":
    run_tests()
"""
# What unittest's loader puts first in sys.path.
FOLDER_OF_FILE = "FIRST_IN_PATH = Path(__file__).parent\n"
BOTH = {"test_plain": "passed", "test_ranks": "passed"}


def setUpModule():
    global PROJECT
    PROJECT = Project()


def tearDownModule():
    PROJECT.close()


class PackagesCase(TestCase):
    """Each test has a folder of its own, in which packages begin."""

    project: Project

    def setUp(self):
        super().setUp()
        self.project = PROJECT
        self.folder = Path(tempfile.mkdtemp(prefix="no-package-", dir=PROJECT.root))

    def write(self, name, source=""):
        """The path of the file in the project."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        return str(file.relative_to(PROJECT.root))

    def package(self, *folders):
        for folder in folders:
            self.write(f"{folder}/__init__.py")

    def subject(self, file, name, above=".", value="beside", more=""):
        self.write(os.path.normpath(f"{file}/{'../' * max(1, len(above))}helper.py"), f"VALUE = {value!r}\n")
        source = SUBJECT.replace("from .helper", f"from {above}helper")
        source = source.replace('NAME, EXPECTED = "name", "value"', f"NAME, EXPECTED = {name!r}, {value!r}")
        return self.write(file, source + more)

    def broken(self, file, source):
        """The message of a file that cannot be imported."""
        ran = self.project.run(self.write(file, source))
        self.assertEqual(list(ran.outcomes.values()), ["error"])
        ((attempt,),) = ran.attempts.values()
        return attempt.said


class PackagesTest(PackagesCase):
    @pytest.mark.slow
    def test_start_methods(self):
        self.package("pkg", "pkg/sub")
        member = self.subject("pkg/sub/test_member.py", "pkg.sub.test_member", above="..", value="above")
        for start in ("fork", "fork-fresh", "spawn"):
            environ = mock.patch.dict(os.environ, TORCH_TESTING_EXT_START=start)
            with self.subTest(start=start), environ, Project.beside(self.project) as project:
                self.assertEqual(project.run(member).outcomes, BOTH)

    @pytest.mark.nightly
    def test_a_new_interpreter_for_each_test(self):
        self.package("pkg")
        threads = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        member = self.subject("pkg/test_member.py", "pkg.test_member", more=threads)
        self.assertEqual(self.project.run(member).outcomes, BOTH)

    def test_two_packages_of_one_name(self):
        self.package("a/tests", "b/tests")
        for root in "ab":
            file = self.subject(f"{root}/tests/test_member.py", "tests.test_member", value=root)
            self.assertEqual(self.project.run(file).outcomes, BOTH)

    @pytest.mark.slow
    def test_a_package_with_the_name_of_one_in_the_standard_library(self):
        self.package("test", "test/distributed")
        imported = "import test.distributed\nassert test.distributed.__path__ == [str(Path(__file__).parent)]\n"
        member = self.subject("test/distributed/test_member.py", "test.distributed.test_member", more=imported)
        self.assertEqual(self.project.run(member).outcomes, BOTH)
        with Project.beside(self.project, "test.support") as project:
            self.assertEqual(project.run(member).outcomes, BOTH)

    def test_a_package_whose_name_is_taken(self):
        """As in pytest, its files cannot be imported."""
        self.package("json")
        message = self.broken("json/test_member.py", "")
        self.assertRegex(
            message, r"No module named 'json\.test_member'[^$]*the name json is taken by .*json/__init__\.py"
        )

    def test_without_a_package(self):
        self.package("pkg")  # ends above the folder of the file
        self.write("pkg/folder/helper.py", "VALUE = 3\n")
        source = "import unittest\nfrom helper import VALUE\nclass T(unittest.TestCase):\n"
        source += "    def test_name(self): self.assertEqual((__name__, VALUE), ('test_x', 3))\n"
        self.assertEqual(self.project.run(self.write("pkg/folder/test_x.py", source)).outcomes, {"test_name": "passed"})


class ByUnittestTest(PackagesCase):
    """unittest's loader imports the files."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        beside = Project.beside(PROJECT, by_pytest=False)
        cls.project_of_class = beside.__enter__()
        cls.addClassCleanup(beside.__exit__, None, None, None)

    def setUp(self):
        super().setUp()
        self.project = self.project_of_class

    def test_a_package_whose_name_is_taken(self):
        """Its files are programs, as they would be without the package."""
        self.package("json")
        self.write("json/beside.py", "VALUE = 3\n")
        source = "import json, unittest\nfrom beside import VALUE\nclass T(unittest.TestCase):\n"
        source += "    def test_name(self): self.assertEqual((__name__, json.loads('3')), ('test_program', VALUE))\n"
        self.assertEqual(self.project.run(self.write("json/test_program.py", source)).outcomes, {"test_name": "passed"})
        message = self.broken("json/test_relative.py", "from .beside import VALUE\n")
        self.assertRegex(message, r"imported as a program.* because the name json is taken by .*json/__init__\.py, so")

    def test_a_file_with_the_name_of_an_imported_module(self):
        source = "import unittest, json\nclass T(unittest.TestCase):\n    def test_it(self): json.loads('3')\n"
        self.assertEqual(self.project.run(self.write("odd/json.py", source)).outcomes, {"test_it": "passed"})

    def test_two_packages_of_one_name(self):
        """The folder of the file is the first in sys.path."""
        self.package("a/tests", "b/tests")
        for root in "ab":
            file = self.subject(f"{root}/tests/test_member.py", "tests.test_member", value=root, more=FOLDER_OF_FILE)
            self.assertEqual(self.project.run(file).outcomes, BOTH)

    @pytest.mark.slow
    def test_a_root_with_another_torch(self):
        """As that of a checkout of PyTorch."""
        self.package("test")
        self.write("torch/__init__.py", "raise ImportError('not built')\n")
        member = self.subject("test/test_member.py", "test.test_member", more=FOLDER_OF_FILE)
        with (
            mock.patch.dict(os.environ, TORCH_TESTING_EXT_START="spawn"),
            Project.beside(PROJECT, by_pytest=False) as project,
        ):
            self.assertEqual(project.run(member).outcomes, BOTH)


class TroublesTest(PackagesCase):
    def test_a_relative_import_without_a_package(self):
        self.write("folder/helper.py")
        message = self.broken("folder/test_x.py", "from .helper import VALUE\n")
        self.assertIn("attempted relative import with no known parent package", message)
        self.assertIn("The file is imported as a program", message)
        self.assertIn(f"because {self.folder}/folder has no __init__.py", message)
        self.assertIn("from helper import f", message)

    def test_a_relative_import_that_leads_too_far(self):
        self.package("pkg")
        message = self.broken("pkg/test_x.py", "from ...above import f\n")
        self.assertIn(f"imported as pkg.test_x, from {self.folder}: the import leads out of pkg.", message)

    def test_an_error_in_the_package(self):
        self.write("pkg/__init__.py", "import no_such_module\n")
        message = self.broken("pkg/test_x.py", "")
        self.assertRegex(
            message, r"No module named 'no_such_module'\n\nTraceback .*\n  File \".*/pkg/__init__.py\", line 1"
        )
        self.assertNotIn("importlib", message)

    def test_a_package_that_skips(self):
        self.write("pkg/__init__.py", "import unittest\nraise unittest.SkipTest('not here')\n")
        ran = self.project.run(self.write("pkg/test_x.py"))
        self.assertEqual([attempt.said for (attempt,) in ran.attempts.values()], ["not here"])
        self.assertEqual(list(ran.outcomes.values()), ["skipped"])


class MainModuleTest(PackagesCase):
    def write_main(self, expected):
        self.package("pkg")
        self.write("pkg/helper.py", "VALUE = 3\n")
        self.write("pkg/test_main.py", MAIN.format(expected=expected))

    def run_main(self, start):
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_TESTING_EXT_START": start}
        return run_warm("-m", "pkg.test_main", cwd=self.folder, env=environ)

    @pytest.mark.slow
    def test_python_m(self):
        """Ranks import the main module as a member of its package, too."""
        self.write_main(3)
        starts = ("fork", "fork-fresh", "spawn")
        with ThreadPoolExecutor(2) as two_at_once:
            finished = list(two_at_once.map(self.run_main, starts))
        for start, done in zip(starts, finished, strict=True):
            with self.subTest(start=start):
                self.assertIn("Ran 1 test", done.stderr)
                self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_printed_command(self):
        self.write_main(4)
        done = self.run_main("auto")
        self.assertEqual(done.returncode, 1)
        self.assertIn("python -m pkg.test_main RanksTest.test_ranks", done.stderr)


if __name__ == "__main__":
    run_tests()
