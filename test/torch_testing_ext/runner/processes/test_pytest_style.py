"""Which tests of a file only pytest would run."""

import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

from kit.files import subject

from torch_testing_ext._process.importing import import_file
from torch_testing_ext._pytest_ranks.pytest_internals import item_fixtures
from torch_testing_ext._testing.bases.tests_for_pytest import pytest_style_tests
from torch_testing_ext.runner.load_as import LoadAs
from torch_testing_ext.runner.processes.loaded_file import LoadedFile

HELPERS = subject(__file__, "helpers_of_pytest_style.py")


class PytestStyleTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="torch_testing_ext_test_")
        cls.addClassCleanup(cls.directory.cleanup)
        cls.root = Path(cls.directory.name)
        (cls.root / "helpers_of_pytest_style.py").write_text(HELPERS)
        sys.path.insert(0, cls.directory.name)
        cls.addClassCleanup(sys.path.remove, cls.directory.name)
        cls.addClassCleanup(sys.modules.pop, "helpers_of_pytest_style", None)

    def found(self, source):
        """The names of the tests, in order."""
        file = self.root / "test_subject_of_pytest_style.py"
        file.write_text("import functools, unittest\n" + textwrap.dedent(source))
        module = import_file(file.stem, file)
        self.addCleanup(sys.modules.pop, file.stem, None)
        suite = unittest.TestLoader().loadTestsFromModule(module)
        tests = [test for part in suite for test in part]
        return [f"{one.cls}.{one.method}" for one in pytest_style_tests(module, tests, item_fixtures.is_fixture)]

    def test_what_pytest_would_run(self):
        for source, names in (
            ("def test_a(): pass\ndef test(): pass\ndef testB(): pass", [".test_a", ".test", ".testB"]),
            ("async def test_a(): pass", [".test_a"]),
            ("def test_a(tmp_path): pass", [".test_a"]),
            ("test_a = lambda: None", [".test_a"]),
            ("if True:\n    def test_a(): pass", [".test_a"]),
            ("class TestA:\n    def test_a(self): pass\n    def helper(self): pass", ["TestA.test_a"]),
            ("class TestA:\n    @staticmethod\n    def test_a(): pass", ["TestA.test_a"]),
            ("class TestA:\n    @classmethod\n    def test_a(cls): pass", ["TestA.test_a"]),
            ("class TestA:\n    class TestB:\n        def test_a(self): pass", ["TestA.TestB.test_a"]),
            ("class Base:\n    def test_a(self): pass\nclass TestB(Base): pass", ["TestB.test_a"]),
            ("class TestA:\n    def test_a(self): self.assertEqual(1, 1)  # forgot its base", ["TestA.test_a"]),
            ("def odd(): pass\nodd.__test__ = True", [".odd"]),
            ("def wrap(f):\n    return functools.wraps(f)(lambda: f())\n@wrap\ndef test_a(): pass", [".test_a"]),
            (
                "from helpers_of_pytest_style import bare_decorator\n@bare_decorator\ndef test_a(): pass",
                [".test_a"],
            ),
            (
                "from helpers_of_pytest_style import Case\nclass TestA(Case): pass",
                ["TestA.test_from_base"],
            ),
            (
                "def test_a(): pass\nclass T(unittest.TestCase):\n    def test_a(self): pass",
                [".test_a"],
            ),
        ):
            with self.subTest(source=source):
                self.assertEqual(self.found(source), names)

    def test_what_is_no_test(self):
        for source in (
            "",
            "def helper(): pass\nclass Helper:\n    def test_a(self): pass",
            "from helpers_of_pytest_style import *",
            "from helpers_of_pytest_style import nonsense\n@nonsense\ndef test_a(): pass",
            "test_data = [1]\nclass Test_data: pass",
            "@functools.cache\ndef test_a(): pass",  # pytest says that it is no function
            "def test_a(): pass\ntest_a.__test__ = False",
            "class TestA:\n    __test__ = False\n    def test_a(self): pass",
            "__test__ = False\ndef test_a(): pass",
            "class TestA:\n    def __init__(self, size): pass\n    def test_a(self): pass",
            "class TestA:\n    def __new__(cls, size): pass\n    def test_a(self): pass",
            "import enum\nclass TestA(enum.Enum):\n    test_a = 1",
            "import dataclasses\n@dataclasses.dataclass\nclass TestA:\n    size: int\n    def test_a(self): pass",
            "class TestA(unittest.TestCase):\n    def test_a(self): pass",
            "class TestMixin:\n    def test_a(self): pass\nclass T(TestMixin, unittest.TestCase): pass",
            "def test_a(self): pass\nclass T(unittest.TestCase): pass\nT.test_a = test_a",
            "def test_a(self): pass",
            "def test_a(case): pass\nclass T(unittest.TestCase):\n    test_b = test_a",
            "def test_a(case, n): pass\nclass T(unittest.TestCase):\n    test_b = functools.partialmethod(test_a, 1)",
            """
            def test_a(): pass
            def load_tests(loader, tests, pattern):
                return unittest.TestSuite([unittest.TestSuite([unittest.FunctionTestCase(test_a)])])
            """,
        ):
            with self.subTest(source=source):
                self.assertEqual(self.found(source), [])

    def test_fixtures_of_pytest(self):
        self.assertEqual(self.found("import pytest\n@pytest.fixture\ndef test_data(): return 1"), [])

    def test_no_name_stands_for_two_tests(self):
        """A test of unittest that is hidden by a name for pytest must not be lost."""
        file = self.root / "test_hidden_by_name.py"
        file.write_text(
            "import unittest\n"
            "class TestA(unittest.TestCase):\n    def test_a(self): pass\n"
            "hidden = [TestA]\n"
            "class TestA:\n    def test_a(self): pass\n"
            "def load_tests(loader, tests, pattern): return loader.loadTestsFromTestCase(hidden[0])\n"
        )
        path, argv = list(sys.path), list(sys.argv)
        try:
            loaded = LoadedFile.load(str(file), LoadAs(by_pytest=False))
        finally:
            sys.path[:], sys.argv[:] = path, argv
            sys.modules.pop(file.stem, None)
        self.assertEqual([one.name for one in loaded.named], ["TestA.test_a"])
        self.assertEqual([one.name for one, _ in loaded.not_run], ["TestA.test_a#2"])


if __name__ == "__main__":
    unittest.main()
