"""The command that runs a test of pytest again has the options of the run, whichever plugin declares them."""

import copy
import os
import shlex
import subprocess
import sys
import types

import pytest

from torch_testing_ext._pytest_ranks import command_by_pytest
from torch_testing_ext._pytest_ranks.marks import COMMAND
from torch_testing_ext._pytest_ranks.pytest_internals import configuration
from torch_testing_ext.launch.aspects import ASPECTS

CONFTEST = """
def pytest_addoption(parser):
    group = parser.getgroup("mine")
    group.addoption("--mine", action="store_true")
    group.addoption("--several", nargs="*", default=[])
    group.addoption("--level", type=int, action="append")
"""
# Words that set an option of ours, by field.
OF_RANKS = {
    "rank_timeout": ["--rank-timeout=1.5"],
    "fake_accelerators": ["--fake-accelerators=2"],
    "sanitize": ["--sanitize"],
    "simulate": ["--simulate=4"],
    "debug_rank": ["--debug-rank=1"],
    "nodes": ["--nodes=2"],
    "update_budgets": ["--update-budgets"],
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The configuration of another session, in a project with options of its own."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "conftest.py").write_text(CONFTEST)
    config = configuration.make_config([f"--rootdir={folder}", str(folder)], [])
    yield config
    configuration.unconfigure(config)


def again(config, *words):
    """The options that come back from these words, before and behind the name of a file."""
    found = []
    for arguments in ([*words, "--", "test_a.py"], ["test_a.py", *words]):
        of_run = copy.copy(config)
        of_run.invocation_params = types.SimpleNamespace(args=arguments)
        found.append(configuration.options_again(of_run))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("field", OF_RANKS)
def test_options_of_ranks_come_back(config, field):
    assert again(config, *OF_RANKS[field]) == OF_RANKS[field]


def test_every_option_of_ranks_is_tried():
    assert set(OF_RANKS) == {option.field for aspect in ASPECTS for option in aspect.options if option.pytest_help}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["-W", "error", "-Wignore::UserWarning"], ["-W", "error", "-W", "ignore::UserWarning"]),
        (["-m", "not slow", "-k", "a or b"], ["-m", "not slow", "-k", "a or b"]),
        (["-o", "xfail_strict=true", "-odist_world_size=3"], ["-o", "xfail_strict=true", "-o", "dist_world_size=3"]),
        (["--runxfail", "--import-mode", "importlib"], ["--runxfail", "--import-mode=importlib"]),
        (["-qx", "-rA", "--tb", "short", "-vv", "--junitxml", "x.xml", "--color=no"], ["-x"]),
        (["--mine", "--level=1", "--level", "-2"], ["--mine", "--level=1", "--level=-2"]),
        (["--several", "x", "y", "-s"], ["--several", "x", "y", "-s"]),
    ],
)
def test_options_of_pytest_and_of_the_project_come_back(config, given, expected):
    assert again(config, *given) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "xdist", [pytest.param([], id="alone"), pytest.param(["-n", "1"], id="xdist", marks=pytest.mark.nightly)]
)
def test_the_command_fails_alike(tmp_path, xdist):
    """A shell runs what was printed, in an interpreter of its own."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "from torch_testing_ext.common_distributed import MultiProcessTestCase\n"
        "@pytest.mark.world_size(2)\n"
        "def test_marked(ranks, pytestconfig): assert not pytestconfig.getoption('mine') or ranks.world_size == 2\n"
        "class TestC(MultiProcessTestCase):\n"
        "    world_size = 2\n"
        "    def setUp(self):\n"
        "        super().setUp()\n"
        "        self._spawn_processes()\n"
        "    @pytest.fixture(autouse=True)\n"
        "    def set_config(self, pytestconfig): type(self).mine = pytestconfig.getoption('mine')\n"
        "    def test_class(self): assert not self.mine\n"
    )
    words = ["--mine", "-o", "dist_world_size=3", "-p", "no:cacheprovider", *xdist]
    first = run(tmp_path, [sys.executable, "-m", "pytest", "-q", *words])
    assert "2 failed" in first, first
    printed = [line.partition("run again:")[2].strip() for line in first.splitlines() if "run again:" in line]
    assert len(printed) == 2, first
    for command in printed:
        second = run(tmp_path, shlex.split(command))
        assert "1 failed" in second and command in second, second


def run(folder, command):
    environ = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, cwd=folder, env=environ, text=True, capture_output=True, check=False).stdout


def test_a_test_of_the_runner_has_its_command():
    item = types.SimpleNamespace(stash={COMMAND: "torchtest --timeout 1 test_a.py::test_b"})
    assert command_by_pytest.command(item) == "torchtest --timeout 1 test_a.py::test_b"
