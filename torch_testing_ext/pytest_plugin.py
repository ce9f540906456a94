"""The plugin for pytest: tests that run in ranks by a mark, test files of PyTorch on our classes, and our profile.

    @pytest.mark.world_size(4)
    def test_sum(dist_env): ...

    python -m pytest --torch-drop-in test/distributed/test_store.py

    python -m pytest --hypothesis-profile=search test/distributed

pytest loads it wherever the package is installed, so it imports nothing until a run uses it. With -v, pytest lists the
names that came from PyTorch after collection.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import types
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import pytest

OPTION = "--torch-drop-in"
_MARK = "world_size"
_MARKS = (_MARK, "standalone")
_EXEC = "torch_testing_ext._cases.distributed_exec"


def pytest_addoption(parser: pytest.Parser) -> None:
    if _is_launched():
        from torch_testing_ext.launch import this_launch

        this_launch()  # before pytest captures the output
    group = parser.getgroup("torch_testing_ext", "tests that run in ranks (torch_testing_ext)")
    group.addoption(OPTION, action="store_true", help="run PyTorch test files on the classes of torch_testing_ext")
    group.addoption(
        "--sanitize",
        nargs="?",
        const="default",
        type=_kinds,
        metavar="KINDS",
        help="check the collectives of ranks more closely; a list such as --sanitize=calls,nan, or default, or all",
    )
    group.addoption(
        "--dist-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="time limit of each test that runs in ranks, unless its mark has a timeout (default: 300)",
    )
    group.addoption(
        "--dist-debug-rank",
        type=_rank,
        metavar="RANK",
        help="the rank that has the terminal, for breakpoint(), --pdb and --trace (default with these two: 0); "
        "there is no time limit then",
    )
    group.addoption(
        "--dist-isolated",
        action="store_true",
        help="run each test that runs in ranks in a new interpreter of its own, as with isolated=True in its mark",
    )
    group.addoption(
        "--dist-lease-folder",
        metavar="DIR",
        help="directory of the files by which tests share accelerators (default: one per user, below /tmp)",
    )


def _kinds(text: str) -> str:
    from torch_testing_ext._sanitizer.kinds import read_kinds

    try:
        read_kinds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _seconds(text: str) -> float:
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(text)
    return int(text)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Install before any conftest imports something."""
    if early_config.known_args_namespace.torch_drop_in:
        _install()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Install in an xdist worker too, which gets its plugins later. Register our profile before Hypothesis wants it."""
    for explanation in _EXPLANATIONS:
        config.addinivalue_line("markers", explanation)
    if _is_launched():
        from torch_testing_ext._pytest_ranks import launched_session

        launched_session.configure(config)
    if config.getoption("--hypothesis-profile", None) == "search":
        from torch_testing_ext._hypothesis import search

        search.register()
        search.choose(search.NAME)
    if config.getoption("--sanitize"):
        os.environ["TORCH_TESTING_EXT_SANITIZE"] = config.getoption("--sanitize")
    if config.getoption(OPTION):
        _install()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    if not config.getoption(OPTION) or config.get_verbosity() <= 0:
        return []
    from torch_testing_ext.upstream import drop_in

    return drop_in.explain().splitlines()


def _install() -> None:
    from torch_testing_ext._cases import invocation
    from torch_testing_ext.upstream import drop_in

    drop_in.install()
    invocation.pytest_arguments = ["-p", __name__, OPTION]


# -- tests that run in ranks


def _is_launched() -> bool:
    """Whether a launcher such as torchrun may have started this process; what is imported then finds out."""
    return any(name in os.environ for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_NUM_TASKS"))


_EXPLANATIONS = (
    "world_size(size, *, backend=None, devices=0, timeout=None, isolated=False): run the test in that many ranks, "
    "each a fresh process; a list of sizes makes one test for each. backend: of the group that dist_env makes. "
    "devices: skip the test on a machine with fewer accelerators. timeout: in seconds. isolated: in a new interpreter "
    "of its own, instead of ranks that are forked off pytest's process (torch_testing_ext)",
    "standalone(*, timeout=None): run the test, and all of its fixtures, in a new interpreter of its own "
    "(torch_testing_ext)",
)


@pytest.fixture
def dist_env() -> Iterator[Any]:
    """The rank of a test with the mark `world_size`: rank, world_size, local_rank, device, backend, group, store."""
    in_rank = sys.modules.get("torch_testing_ext._pytest_ranks.item_in_rank")
    if in_rank is None or not in_rank.is_rank():
        pytest.fail(
            "dist_env was asked for by request.getfixturevalue, outside of ranks. Name it as an argument of the test "
            "or fixture, so that what needs it is set up in the ranks",
            pytrace=False,
        )
    yield from in_rank.make_dist_env()


@pytest.fixture(name="spawn")
def _spawn() -> Any:
    """The function torch_testing_ext.ranks.spawn: `spawn(function, world_size, *args)`."""
    from torch_testing_ext import ranks

    return ranks.spawn


@pytest.fixture(name="run_script")
def _run_script() -> Any:
    """The function torch_testing_ext.ranks.run_script: `run_script(path, *args, ranks=4)`."""
    from torch_testing_ext import ranks

    return ranks.run_script


@pytest.hookimpl(tryfirst=True)
def pytest_plugin_registered(plugin: Any) -> None:
    """Find the classes of fixtures in a conftest, before pytest looks for fixtures there."""
    if _EXEC in sys.modules and isinstance(plugin, types.ModuleType):
        from torch_testing_ext._pytest_ranks import exec_classes

        exec_classes.add_fixtures_to_plugin(plugin)


_seen: weakref.WeakSet[Any] = weakref.WeakSet()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any) -> None:
    """Find the classes of fixtures in a test file, when the first of its names is looked at."""
    if _EXEC in sys.modules and collector not in _seen:
        from torch_testing_ext._pytest_ranks import exec_classes

        _seen.add(collector)
        exec_classes.add_fixtures_of(collector)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker(_MARK) is not None:
        from torch_testing_ext._pytest_ranks import marks

        marks.expand(metafunc)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: Any) -> Generator[None, Any, Any]:
    """Refuse marked tests that cannot run: the collection of what contains them fails."""
    report = yield
    if report.passed and _EXEC in sys.modules:
        from torch_testing_ext._pytest_ranks import exec_classes

        exec_classes.add_marks(report.result)
    if report.passed and any(_concerns_us(node) for node in report.result):
        from torch_testing_ext._pytest_ranks import marks

        if faults := "\n".join(marks.faults(report.result)):
            report.outcome, report.longrepr, report.result = "failed", faults, []
    return report


def _concerns_us(node: Any) -> bool:
    if not isinstance(node, pytest.Function):
        return False
    if _EXEC in sys.modules or "dist_env" in node.fixturenames:
        return True
    return any(mark.name in _MARKS or "standalone" in mark.kwargs for mark in node.iter_markers())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    marks = sys.modules.get("torch_testing_ext._pytest_ranks.marks")
    if marks is None:
        return
    wish, spec = item.stash.get(marks.STANDALONE, None), item.stash.get(marks.SPEC, None)
    if wish is not None and not hasattr(item.config.option, "dist_is_standalone"):
        from torch_testing_ext._pytest_ranks import standalone

        standalone.set_up(item)
        item.runtest = functools.partial(standalone.run, item, wish.timeout)
    elif spec is not None:
        from torch_testing_ext._pytest_ranks import in_parent

        in_parent.set_up(item, spec)
        item.runtest = functools.partial(in_parent.run, item, spec)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    report = yield
    launch = sys.modules.get("torch_testing_ext.launch")
    error = call.excinfo.value if call.excinfo is not None else None
    if launch is not None and report.failed and isinstance(getattr(error, "outcome", None), launch.Outcome):
        from torch_testing_ext._pytest_ranks import reports

        reports.show(report, call.excinfo, item)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: Any) -> None:
    in_rank = sys.modules.get("torch_testing_ext._pytest_ranks.item_in_rank")
    if in_rank is not None and in_rank.is_rank():
        in_rank.on_report(report)
