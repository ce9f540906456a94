"""Marked tests that cannot run are refused when they would, with a remedy; a run that has none pays nothing."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest
from kit.files import subject
from kit.pytest_runs import PACKAGE, PytestCase, run_pytest

from torch_testing_ext._pytest_ranks.refusals import OF_RUNNER
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner.options.all_options import OPTION_TABLE

if sys.version_info >= (3, 11):
    import tomllib

# Each is the body of a file, with the test and the text that must be in its error.
REFUSED = {
    "zero": ("@mark(0)\ndef test_x(): ...", "the world size is 0; it must be a number of ranks, 1 or more"),
    "negative": ("@mark(-2)\ndef test_x(): ...", "the world size is -2"),
    "string": ("@mark('2')\ndef test_x(): ...", "the world size is '2'"),
    "boolean": ("@mark(True)\ndef test_x(): ...", "the world size is True"),
    "fraction": ("@mark(2.0)\ndef test_x(): ...", "the world size is 2.0"),
    "nothing": ("@mark()\ndef test_x(): ...", "needs one argument"),
    "bare": ("@pytest.mark.world_size\ndef test_x(): ...", "needs one argument"),
    "several": ("@mark(2, 4)\ndef test_x(): ...", "needs one argument"),
    "empty": ("@mark([])\ndef test_x(): ...", "the list of world sizes is empty"),
    "in_list": ("@mark([2, 0])\ndef test_x(): ...", "the world size is 0"),
    "twice": ("@mark([2, 2])\ndef test_x(): ...", "contain one twice"),
    "two_marks": ("@mark(2)\n@mark(3)\ndef test_x(): ...", "the test has the mark world_size twice"),
    "keyword": ("@mark(2, device=1)\ndef test_x(): ...",
                "the mark world_size has no argument device. Did you mean: devices?"),
    "faults": ("@mark(2, faults=[])\ndef test_x(): ...", "faults are a mark of their own, @pytest.mark.faults(...)"),
    "size_by_name": ("@mark(world_size=2)\ndef test_x(): ...", "Write @pytest.mark.world_size(2)"),
    "size_twice": ("@mark(2, size=2)\ndef test_x(): ...", "needs one argument"),
    "misspelt": ("@pytest.mark.wrld_size(2)\ndef test_x(dist_env): ...", "(it has the mark wrld_size: a typo?)"),
    "misspelt_backend": ("@mark(2, backend='glo')\ndef test_x(): ...", "backend is 'glo'. Did you mean: gloo?"),
    "backend": ("@mark(2, backend=1)\ndef test_x(): ...", "backend is 1"),
    "devices": ("@mark(2, devices='all')\ndef test_x(): ...", "devices is 'all'"),
    "timeout": ("@mark(2, timeout=0)\ndef test_x(): ...", "timeout is 0"),
    "isolated": ("@mark(2, isolated=1)\ndef test_x(): ...", "isolated is 1; it must be True or False"),
    "coroutine": ("import unittest\nclass T(unittest.TestCase):\n    @mark(2)\n    async def test_x(self): ...",
                  "the test is `async def`, which this class does not run"),
    "generator": ("@mark(2)\nasync def test_x():\n    yield", "the test contains `yield`"),
    "no_mark": ("def test_x(dist_env): ...", "the test uses dist_env, which exists only in ranks. Add"),
    "session": ("@pytest.fixture(scope='session')\ndef wide(dist_env): ...\n@mark(2)\ndef test_x(wide): ...",
                "fixture 'wide' has scope 'session', but needs dist_env"),
    "module": ("@pytest.fixture\ndef a(capsys): ...\n@pytest.fixture(scope='module')\ndef b(a): ...\n"
               "@mark(2)\ndef test_x(b): ...", "fixture 'b' has scope 'module', but needs capsys"),
    "parameter": ("@mark(2)\n@pytest.mark.parametrize('dist_env', [0, 1])\ndef test_x(dist_env): ...",
                  "the test parametrizes dist_env"),
    "unittest": ("import unittest\nclass T(unittest.TestCase):\n    @mark([1, 2])\n    def test_x(self): ...",
                 "so it cannot have a list of world sizes"),
    "ours": ("from torch_testing_ext.common_distributed import MultiProcessTestCase\n@mark(2)\n"
             "class T(MultiProcessTestCase):\n    def test_x(self): ...", "T already runs its tests in ranks"),
}  # fmt: skip
HEAD = "import pytest\nmark = pytest.mark.world_size\n"


class RefusalsTest(PytestCase):
    @pytest.mark.slow
    def test_each_is_refused_alone_and_the_rest_runs(self) -> None:
        files = {f"test_{name}.py": f"{HEAD}{body}\n" for name, (body, _) in REFUSED.items()}
        files["test_fine.py"] = (
            f"{HEAD}def test_x(): open('has_run', 'w').close()\n"
            "@mark(0)\n@pytest.mark.skip\ndef test_skipped(): ...\n"
            "@mark(0)\n@pytest.mark.xfail\ndef test_expected(): ...\n"
            "@mark(0)\ndef test_deselected(): ...\n"
            "@mark(0)\n@pytest.mark.parametrize('number', range(3))\ndef test_parameters(number): ...\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            run = run_pytest(files, "--deselect=test_fine.py::test_deselected", folder=folder)
            self.assertTrue(Path(folder, "has_run").exists())
        self.assertEqual(run.code, 1, run.text)
        for name, (_, text) in REFUSED.items():
            with self.subTest(name=name):
                found = re.search(rf"^(.*)\n\ntest_{name}\.py:\d+: test_x$", run.text, re.M)
                self.assertIsNotNone(found, run.text)
                assert found is not None
                self.assertIn(text, found.group(1))
        parameters = {f"test_parameters[{number}]": "error" for number in range(3)}
        rest = {
            name: outcome for name, outcome in run.outcomes.items() if not name.removeprefix("T.").startswith("test_x")
        }
        self.assertEqual(rest, {"test_skipped": "skipped", "test_expected": "error", **parameters})
        # In CI, the summary has whole messages.
        errors = run.text.partition("short test summary")[0]
        self.assertEqual(len(re.findall(r"^test_fine.py:\d+: test_parameters$", errors, re.M)), 1, run.text)
        self.assertRegex(run.text, r"1 passed, 1 skipped, 1 deselected, 1 warning, \d+ errors, 3 refused")

    @pytest.mark.slow
    def test_marks_that_hooks_add_count_or_are_refused(self) -> None:
        """As pytest's own marks do, until the test is set up; a mark that comes later fails the test by name."""
        conftest = subject(__file__, "refused_marks_conftest.py")
        source = subject(__file__, "refused_marks.py")
        run = run_pytest({"conftest.py": conftest, "test_x.py": source}, "--doctest-modules")
        refused = {
            "test_x.of_doctest": "a DoctestItem cannot run in ranks, only functions and methods can",
            "test_other_size_from_hook[world_size=2]": "the test has the mark world_size twice",
            "test_other_size_from_hook[world_size=3]": "the test has the mark world_size twice",
            "test_list": "to a test that a hook marks after collection",
            "test_fixture": "was added during its set-up, which is too late",
            "test_body": "was added during its call, which is too late",
            "test_body_in_ranks": "was added during its call, which is too late",
        }
        for name, text in refused.items():
            self.assertIn(run.outcomes.pop(name), ("error", "failed"), run.text)
            self.assertIn(text, run.messages[name])
        passed = ("test_from_hook", "test_unmarked", "test_alone", "TestSetUp.test_from_set_up")
        self.assertOutcomes(run, dict.fromkeys(passed, "passed"))

    def test_a_fixture_of_the_parent_cannot_get_dist_env(self) -> None:
        source = HEAD + (
            "def helper(request): return request.getfixturevalue('dist_env')\n"
            "@pytest.fixture\ndef hidden(request): return helper(request)\n"
            "@mark(2)\ndef test_x(hidden): ...\n"
            "@mark(2)\ndef test_y(request):\n    assert request.getfixturevalue('dist_env').world_size == 2\n"
        )
        run = run_pytest({"test_x.py": source})
        self.assertOutcomes(run, {"test_x": "error", "test_y": "passed"})
        self.assertIn("Name it as an argument", run.messages["test_x"])


class PluginTest(PytestCase):
    def test_options_of_torchtest_are_named(self) -> None:
        """With the remedy, unless a conftest has an option of this name."""
        conftest = "def pytest_addoption(parser): parser.addoption('--watch', action='store_true')\n"
        source = "def test_x(): ...\n"
        run = run_pytest({"test_x.py": source}, "--tb=short", "--gpus=2", "test_x.py")
        self.assertIn("ERROR: --gpus is an option of torchtest: run torchtest --gpus=2, in place of pytest", run.errors)
        own = run_pytest({"conftest.py": conftest, "test_x.py": source}, "--watch", "test_x.py")
        self.assertOutcomes(own, {"test_x": "passed"})
        self.assertLessEqual(set(OF_RUNNER), {flag for spec in OPTION_TABLE.values() for flag in spec.flags})

    def test_the_entry_point_and_what_a_plain_run_imports(self) -> None:
        """The package is installed by its metadata alone; `-p` loads the plugin once, too."""
        source = subject(__file__, "plain_run.py")
        with tempfile.TemporaryDirectory() as folder:
            metadata = Path(folder, "torch_testing_ext_as_installed-1.0.dist-info")
            metadata.mkdir()
            Path(metadata, "METADATA").write_text("Metadata-Version: 2.1\nName: torch_testing_ext_as_installed\n")
            Path(metadata, "entry_points.txt").write_text(_entry_points())
            path = f"{PACKAGE.parent}:{folder}"
            for plugin in ((), ("-p", "torch_testing_ext.pytest_plugin")):
                with self.subTest(plugin=plugin):
                    run = run_pytest({"test_x.py": source}, plugin=plugin, folder=folder, cold=True, PYTHONPATH=path)
                    self.assertOutcomes(run, {"test_plain": "passed"})

    def test_the_mark_is_explained(self) -> None:
        run = run_pytest({}, "--markers")
        signature = (
            "size, *, backend=None, devices='auto', timeout=None, isolated=False, init=None, scope='function', nodes=1"
        )
        self.assertIn(f"@pytest.mark.world_size({signature}): run", run.text)
        marked = run_pytest({"test_x.py": f"{HEAD}@mark(1)\ndef test_x(): ..."}, "--strict-markers")
        self.assertOutcomes(marked, {"test_x": "passed"})


def _entry_points() -> str:
    text = Path(PACKAGE.parent, "pyproject.toml").read_text()
    if sys.version_info >= (3, 11):
        points = tomllib.loads(text)["project"]["entry-points"]["pytest11"]
    else:
        points = dict(re.findall(r'^"(torch_testing_ext\S+)" = "(\S+)"$', text, re.M))
    return "[pytest11]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())


if __name__ == "__main__":
    run_tests()
