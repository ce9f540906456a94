"""The runner beside a plain run: warm servers, watching, affected tests, reports, accelerators, worlds, sweeps."""

from __future__ import annotations

import re

import pytest
from kit.terminals import Terminal
from stranger import Stranger

LIBRARY = "VALUE = 2\n"
OTHER = "OTHER = 1\n"
TEST_VALUE = """
import library
import torch

def test_value():
    assert torch.tensor(library.VALUE).item() == 2
"""
TEST_OTHER = """
import other

class TestOther:
    def test_other(self):
        assert other.OTHER == 1
"""
TEST_RANKS = """
import pytest
import torch
import torch.distributed as dist

@pytest.mark.world_size(2)
def test_ranks(dist_env):
    tensor = torch.ones(2, device=dist_env.device)
    dist.all_reduce(tensor)
    torch.testing.assert_close(tensor, torch.full_like(tensor, dist_env.world_size))
"""
PROJECT = {
    "library.py": LIBRARY,
    "other.py": OTHER,
    "test_value.py": TEST_VALUE,
    "test_other.py": TEST_OTHER,
    "test_ranks.py": TEST_RANKS,
    ".gitignore": "__pycache__\n.torch_testing_ext\n",
}


@pytest.fixture
def project(stranger: Stranger) -> Stranger:
    stranger.write(PROJECT)
    stranger.commit()
    return stranger


def test_warm(project: Stranger) -> None:
    """And a run without the option after it, which uses the server that runs."""
    for options in ("--warm", "--warm", ""):
        printed = project.types(f"torchtest {options}")
        assert printed.endswith("\n3 passed, 0 failed, 0 skipped\n")
        assert printed.splitlines()[0].endswith(", warm")
    project.types("torchtest --warm=off --list")
    assert project.servers() == []


def test_affected_and_why(project: Stranger) -> None:
    """Of one change in one file, with a torch that looks for libraries when it is imported."""
    project.types("torchtest")
    assert "no test is affected" in project.types("torchtest --affected")
    project.write({"other.py": "OTHER = 1  # changed\n"})
    assert "not selected" in project.types("torchtest why test_value.py test_ranks.py")
    assert "other.py" in project.types("torchtest why test_other.py")
    printed = project.types("torchtest --affected")
    assert printed.endswith("\n1 passed, 0 failed, 0 skipped\n")
    assert "test_other.py::TestOther::test_other" in printed


def test_watch(project: Stranger) -> None:
    environ = {**project.environ, "TERM": "xterm"}
    environ.pop("COLUMNS", None)
    terminal = Terminal(80, ["torchtest", "--watch"], project.project, environ)
    try:
        terminal.expect("3 passed ·")
        project.write({"library.py": "VALUE = 3\n"})
        terminal.expect("1 failed ·")
        terminal.expect("test_value.py::test_value")
        project.write({"library.py": "VALUE = 1 + 1\n"})
        # This test alone.
        terminal.expect("1 passed ·")
        terminal.press("q")
    finally:
        terminal.close()


def test_reports(project: Stranger) -> None:
    project.write({"library.py": "VALUE = 3\n"})
    project.types("torchtest --html report.html --junitxml report.xml", code=1)
    assert "test_value.py::test_value" in (project.project / "report.html").read_text(encoding="utf-8")
    assert '<failure message="assert 3 == 2' in (project.project / "report.xml").read_text(encoding="utf-8").replace(
        "AssertionError: ", ""
    )


def test_fake_accelerators(project: Stranger) -> None:
    """The device is compiled for this torch."""
    project.write({"test_devices.py": TEST_RANKS.replace("world_size(2)", "world_size(2, devices=2)")})
    printed = project.types("torchtest --fake-accelerators 2 test_devices.py")
    assert printed.endswith("\n1 passed, 0 failed, 0 skipped\n")


def test_whole_world(project: Stranger) -> None:
    project.write({"test_world.py": TEST_RANKS.split("    torch.testing")[0]})
    printed = project.types("torchtest --simulate 8 test_world.py")
    assert printed.endswith("\n1 passed, 0 failed, 0 skipped\n")


def test_sweep(project: Stranger) -> None:
    printed = project.types("torchtest --sweep kill -o sweep.within=3 test_ranks.py")
    assert re.search(r"(?m)^  kill +ranks 0, 1$", printed), printed
    assert re.search(r"(?m)^  call\(1\) ", printed), printed


def test_show_takes_what_a_run_takes(project: Stranger) -> None:
    project.write({"library.py": "VALUE = 3\n", "other.py": "OTHER = 2\n"})
    project.types("torchtest", code=1)
    for name, failed, passed in (
        ("test_value.py", "test_value.py::test_value", "test_other"),
        ("test_other.py::TestOther", "test_other.py::TestOther::test_other", "test_value"),
        ("test_other", "test_other.py::TestOther::test_other", "test_value"),
    ):
        shown = project.types(f"torchtest show {name}")
        assert shown.startswith(f"{failed}\n")
        assert re.search(r"(?m)^in torchtest, \d{4}-", shown)
        assert passed not in shown
    # Of the latest run alone.
    project.write({"other.py": "OTHER = 1\n"})
    project.types("torchtest", code=1)
    assert "test_other" not in project.types("torchtest show")


COVERAGE = """
[tool.coverage.run]
parallel = true
patch = ["subprocess", "fork", "_exit"]
"""


def test_coverage(project: Stranger) -> None:
    """Of the lines of each rank, by the settings of the page, and by pytest-cov's option."""
    project.write(
        {
            "pyproject.toml": COVERAGE,
            "branches.py": "def branch(rank):\n    if rank == 1:\n        return 'one'\n    return 'another'\n",
            "test_branches.py": TEST_RANKS.replace(
                "    tensor =", "    branch(dist_env.rank)\n    tensor =", 1
            ).replace("import pytest", "import pytest\nfrom branches import branch"),
        }
    )
    project.types("coverage run -m torch_testing_ext test_branches.py && coverage combine --quiet")
    assert re.search(r"(?m)^branches.py +4 +0 +100%$", project.types("coverage report --include=branches.py"))
    # As pytest-cov has it.
    run = project.types("torchtest --cov=branches")
    assert run.splitlines()[-1] == "coverage: 100 % of the lines, in htmlcov/index.html"
    assert "CoverageWarning" not in run and "left out" not in run
    assert re.search(r"(?m)^branches.py +4 +0 +100%$", project.types("coverage report"))
    assert "and then coverage report" in project.types("torchtest --cov-report=term", code=4)


def test_options_of_pytest(project: Stranger) -> None:
    project.write(
        {
            "conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--model', default='small')\n",
            "test_model.py": "def test_model(request):\n    assert request.config.getoption('model') == 'big one'\n",
        }
    )
    project.types("torchtest test_model.py", code=1)
    project.types("torchtest test_model.py -- --model 'big one'")
    assert "write it after --" in project.types("torchtest --model big", code=4)
    # The printed command has them, too.
    printed = project.types("torchtest test_model.py -- --model 'small one'", code=1)
    (again,) = re.findall(r"(?m)^run again:  (.*)$", printed)
    assert "small one" in project.types(again, code=1)


def test_version(project: Stranger) -> None:
    assert re.match(r"torch-testing-ext \d\S*, torch \d\S*, pytest \d", project.types("torchtest --version"))


def test_gpus(project: Stranger) -> None:
    """No guess at what a newcomer means by 0, and the word of Docker for all."""
    assert "write '0,' for GPU 0" in project.types("torchtest --gpus 0", code=4)
    assert "torch sees no GPU on this machine" in project.types("torchtest --gpus 0,1", code=4)
    for names in ("all", "auto", "none"):
        assert project.types(f"torchtest --gpus {names} test_ranks.py").endswith("\n1 passed, 0 failed, 0 skipped\n")


HANG = """
import pytest
import time
import torch.distributed as dist

@pytest.mark.world_size(4, timeout=4)
def test_hang(dist_env):
    if dist_env.rank == 3:
        time.sleep(1000)
    dist.barrier()
"""


def test_arrow_of_a_hang(project: Stranger) -> None:
    """It leads to the rank that never came: the last of the four rows."""
    project.write({"test_hang.py": HANG})
    project.types("torchtest test_hang.py --html report.html", code=1)
    page = (project.project / "report.html").read_text(encoding="utf-8")
    (arrow,) = re.findall(r'<line [^>]*class="arrow waits"[^>]*>', page)
    assert 'y2="70.0"' in arrow, arrow
