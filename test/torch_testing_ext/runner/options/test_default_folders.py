"""The root of a project and its folders of tests, where nothing names them; and what is named in their place."""

import unittest

from kit.files import FolderCase

from torch_testing_ext._process.project_folder import project_root
from torch_testing_ext.runner.options import UsageError
from torch_testing_ext.runner.options.default_folders import default_folders
from torch_testing_ext.runner.options.sources import read_options
from torch_testing_ext.runner.scheduling.finding_files import test_files


class DefaultFoldersTest(FolderCase):
    def folders(self, **settings):
        """The default folders, with the content of settings files: `pytest_ini` is that of pytest.ini."""
        files = {name.replace("_", ".", 2 if name.startswith("_") else 1): text for name, text in settings.items()}
        for name, text in files.items():
            self.write(name, text)
        try:
            return [path.relative_to(self.root).as_posix() for path in default_folders(self.root)]
        finally:
            for name in files:
                (self.root / name).unlink()

    def test_the_root_without_testpaths(self):
        """As pytest does it: a test that is left out in silence is a false green."""
        self.assertEqual(self.folders(), ["."])
        self.write("tests/test_x.py", "")
        self.assertEqual(self.folders(), ["."])
        self.assertEqual(self.folders(pytest_ini="", tox_ini="[pytest]\ntestpaths = tests\n"), ["."])
        self.assertEqual(self.folders(_pytest_toml='[pytest]\ntestpaths = ["tests"]\n', pytest_ini=""), ["tests"])

    def test_testpaths_of_pytest(self):
        for folder in ("test", "a/checks", "b/checks", "my tests"):
            (self.root / folder).mkdir(parents=True)
        for settings, expected in (
            ({"pytest_ini": "[pytest]\ntestpaths = a/checks\n"}, ["a/checks"]),
            ({"pytest_ini": "[pytest]\ntestpaths = b/checks a/checks\n"}, ["b/checks", "a/checks"]),
            ({"pytest_ini": "[pytest]\ntestpaths = */checks\n"}, ["a/checks", "b/checks"]),
            ({"pytest_ini": "[pytest]\ntestpaths = 'my tests'\n"}, ["my tests"]),
            ({"pytest_ini": "[pytest]\ntestpaths = nowhere\n"}, ["."]),
            ({"pytest_ini": "[pytest]\ntestpaths = 'open\n"}, ["."]),
            ({"tox_ini": "[tox]\n[pytest]\ntestpaths =\n  a/checks\n"}, ["a/checks"]),
            ({"tox_ini": "[tox]\ntestpaths = a/checks\n"}, ["."]),
            ({"setup_cfg": "[tool:pytest]\ntestpaths = a/checks\n"}, ["a/checks"]),
            (
                {"pytest_ini": "[pytest]\ntestpaths = a/checks\n", "setup_cfg": "[tool:pytest]\ntestpaths = b"},
                ["a/checks"],
            ),
        ):
            with self.subTest(**settings):
                self.assertEqual(self.folders(**settings), expected)

    def test_testpaths_in_toml(self):
        (self.root / "tests").mkdir(), (self.root / "checks").mkdir()
        for text, expected in (
            ('[tool.pytest.ini_options]\ntestpaths = ["checks"]\n', ["checks"]),
            ('[tool.pytest.ini_options]\ntestpaths = "checks tests"\n', ["checks", "tests"]),
            ('[tool.pytest]\ntestpaths = ["checks"]\n', ["checks"]),
            ('[tool.other]\ntestpaths = ["checks"]\n', ["."]),
            ("[tool.pytest\ntestpaths", ["."]),
            ("tool = 3 # testpaths", ["."]),
        ):
            with self.subTest(text=text):
                self.assertEqual(self.folders(pyproject_toml=text), expected)
        self.assertEqual(self.folders(pytest_toml='[pytest]\ntestpaths = ["checks"]\n'), ["checks"])

    def test_the_root(self):
        inner = self.root / "a" / "b"
        inner.mkdir(parents=True)
        self.assertEqual(project_root(inner), inner)
        self.write("a/pyproject.toml", "[project]\nname = 'x'\n")
        self.assertEqual(project_root(inner), inner, "it says nothing about tests")
        self.write("setup.cfg", "[tool:pytest]\n")
        self.assertEqual(project_root(inner), self.root)
        self.write("a/pyproject.toml", "[tool.torch_testing_ext]\n")
        self.assertEqual(project_root(inner), self.root / "a")
        self.write("a/b/pytest.ini", "")
        self.assertEqual(project_root(inner), inner)

    def found(self, *argv, cwd=""):
        here = self.root / cwd
        return test_files(read_options(argv, {}, self.root, here).options, self.root, here)

    def test_a_directory_that_is_named_is_used(self):
        """Whatever the settings say, and from which folder it is named."""
        self.write("checks/test_x.py", ""), self.write("checks/deep/test_y.py", "")
        both = ("checks/deep/test_y.py", "checks/test_x.py")
        self.write("check/test_no.py", "")
        self.assertEqual(self.found("checks"), both)
        self.assertEqual(self.found("checks", cwd="checks"), both)
        self.assertEqual(self.found("deep", cwd="checks"), both[:1])
        self.assertEqual(self.found("checks/test_x.py::C::test", cwd="checks/deep"), both[1:])
        self.write("pyproject.toml", "[tool.torch_testing_ext]\ntests = ['nowhere']\n")
        self.assertEqual(self.found("checks"), both)
        with self.assertRaisesRegex(UsageError, "nowhere does not exist"):
            self.found()


if __name__ == "__main__":
    unittest.main()
