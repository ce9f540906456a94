"""The plugin for pytest: tests that run in ranks by a mark, test files of PyTorch on our classes, and our profile.

    @pytest.mark.world_size(4)
    def test_sum(dist_env): ...

    python -m pytest --drop-in test/distributed/test_store.py

    python -m pytest --hypothesis-profile=search test/distributed

pytest loads it wherever the package is installed, so it imports nothing until a run uses it. With -v, pytest lists the
names that came from PyTorch after collection.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import types
import typing
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

# Before pytest takes stdin away, and plugins start threads, these look at both.
from torch_testing_ext._process import early_threads as early_threads, terminal as terminal, words
from torch_testing_ext._process.declarations import AskedOptions, CannotBegin, Option, variables_of
from torch_testing_ext._process.setting_names import PREFIX
from torch_testing_ext._process.setting_readers import count, read_boolean
from torch_testing_ext._tests import launcher_variables
from torch_testing_ext.launch.aspects import ASPECTS
from torch_testing_ext.launch.aspects.world import SIZE, SIZE_OF_MARKS
from torch_testing_ext.launch.start_settings import SHOWLOCALS

if TYPE_CHECKING:
    from torch_testing_ext.layouts import Layout
    from torch_testing_ext.ranks import DistEnv, Ranks, RunScript, Spawn, Traffic

OPTION = "--drop-in"
_GROUP = "torch_testing_ext"
_MARK = "world_size"
T = TypeVar("T")
_MARKS = (_MARK, "standalone", "faults")
_LAYOUTS = "layouts"


class _Hooks:
    """The hooks that other plugins may implement."""

    @pytest.hookspec(firstresult=True)
    def pytest_mark_of_ranks(self, item: pytest.Function, mark: pytest.Mark | None) -> pytest.Mark | None:
        """Return the mark `world_size` that a test stands for by something else than its marks, such as its class.

        `mark` is the closest one that it has. Raises BadMark for a test that cannot run in ranks.
        """


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(_Hooks)


# Plugins that come with what test files import, and where they are registered.
_brought: list[types.ModuleType] = []
_managers: weakref.WeakSet[pytest.PytestPluginManager] = weakref.WeakSet()


def bring(plugin: types.ModuleType) -> None:
    """Register a plugin in the runs of pytest that use this one: those of this process, and those that begin later."""
    _brought.append(plugin)
    for manager in _managers:
        manager.register(plugin, plugin.__name__)


def _register_what_was_brought(manager: pytest.PytestPluginManager) -> None:
    _managers.add(manager)
    for plugin in _brought:
        manager.register(plugin, plugin.__name__)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options, and those of pytest's configuration."""
    if _is_launched():
        from torch_testing_ext.launch import this_launch

        # Before pytest captures the output.
        this_launch()
    group = parser.getgroup(_GROUP, "tests that run in ranks (torch_testing_ext)")
    group.addoption(
        OPTION, action="store_true", help="run PyTorch's own test files on the classes of torch_testing_ext"
    )
    for option in _options_of_aspects():
        group.addoption(option.flag, help=option.pytest_help, **_arguments(option))
    parser.addini(
        "dist_isolated",
        "run each test in ranks in a new interpreter, as isolated=True of its mark does",
        type="bool",
        default=False,
    )
    # No option: many projects have one of this name.
    parser.addini("dist_world_size", "run tests with the mark world_size in so many ranks", default="")
    parser.addini(
        "dist_lease_folder",
        "directory of the lock files for sharing accelerators (default: one per user, below /tmp)",
        default="",
    )


def _options_of_aspects() -> Iterator[Option[Any]]:
    for aspect in ASPECTS:
        yield from (option for option in aspect.options if option.pytest_help)


def _arguments(option: Option[Any]) -> dict[str, Any]:
    """The arguments of argparse for an option of an aspect. Without the option, its value is None."""
    if option.read is read_boolean:
        return {"action": "store_const", "const": True}
    alone = {"nargs": "?", "const": option.alone} if option.alone else {}
    return {"type": _reader(option.read), "metavar": option.metavar, **alone}


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make a reader of argparse's of one whose ValueError has a message."""

    def read_argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_argument


class _Asked(AskedOptions):
    """The options that a run of pytest was given."""

    def __init__(self, options: argparse.Namespace):
        self._options = options

    def value(self, option: Option[T]) -> T:
        value: T | None = getattr(self._options, option.field, None) if option.pytest_help else None
        return option.default if value is None else value


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Install before any conftest imports something."""
    try:
        for aspect in ASPECTS:
            aspect.begin(_Asked(early_config.known_args_namespace), runs_tests=True)
    except (CannotBegin, ValueError) as error:
        raise pytest.UsageError(str(error)) from None
    if early_config.known_args_namespace.drop_in:
        _install()


@pytest.hookimpl(wrapper=True, specname="pytest_load_initial_conftests")
def pytest_refuse_options_of_runner(
    early_config: Any, parser: pytest.Parser, args: list[str]
) -> Generator[None, Any, Any]:
    """Name the options of torchtest that pytest was given, once conftests have added theirs."""
    result = yield
    if any(word.startswith("--") for word in args):
        _, unknown = parser.parse_known_and_unknown_args(args, copy.copy(early_config.option))
        if unknown:
            from torch_testing_ext._pytest_ranks import refusals

            refusals.refuse_options_of_runner(unknown)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Install in an xdist worker too, which gets its plugins later. Register our profile before Hypothesis wants it."""
    _register_what_was_brought(config.pluginmanager)
    for explanation in _EXPLANATIONS:
        config.addinivalue_line("markers", explanation)
    if _is_launched():
        from torch_testing_ext._pytest_ranks import launched_session

        launched_session.configure(config)
    if config.getoption("--hypothesis-profile", None) == "search":
        from torch_testing_ext._hypothesis import replayed_examples

        replayed_examples.choose_search()
    if config.getini("dist_world_size"):
        try:
            os.environ[SIZE_OF_MARKS.name] = str(count(config.getini("dist_world_size")))
        except ValueError as error:
            raise pytest.UsageError(f"dist_world_size: {error}") from None
    if config.getini("dist_lease_folder"):
        from torch_testing_ext._machine.device_locks import LEASE_FOLDER

        os.environ[LEASE_FOLDER] = config.getini("dist_lease_folder")
    _configure_aspects(config)
    if config.option.showlocals:
        # Failures of ranks show them, too.
        os.environ[SHOWLOCALS.name] = "1"
    if config.getoption(OPTION):
        _install()


def _configure_aspects(config: pytest.Config) -> None:
    """Refuse options that contradict each other, and set the variables by which the others reach ranks."""
    asked = _Asked(config.option)
    given = {option.field: option for option in _options_of_aspects() if config.getoption(option.field) is not None}
    for option in given.values():
        for other, why in option.apart.items():
            if other in given:
                raise pytest.UsageError(f"{option.flag} and {given[other].flag} cannot be combined: {why}")
    try:
        if any(name.startswith(PREFIX) for name in os.environ):
            from torch_testing_ext.launch.launch_settings import check_settings

            check_settings()
        for aspect in ASPECTS:
            aspect.require(asked)
            os.environ.update(variables_of(aspect.options, asked))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Have workers run their tests in the main thread, the only one that can fork ranks and that Ctrl-C interrupts.

    Before pytest-xdist 3.6, a worker on a busy machine may run all of them in another thread.
    """
    import execnet

    try:
        execnet.Group(execmodel="main_thread_only")
    except ValueError:
        # execnet before 2.1 has no such workers.
        return
    for spec in specs:
        spec.execmodel = spec.execmodel or "main_thread_only"


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Lines about all tests: why this process is no rank, and the effects of the options."""
    lines = []
    if _is_launched():
        from torch_testing_ext.launch import why_no_rank

        lines.append(why_no_rank())
    lines += [aspect.header(_Asked(config.option)) for aspect in ASPECTS]
    return [line for line in lines if line]


def pytest_report_collectionfinish(config: pytest.Config, items: list[Any]) -> list[str]:
    """Lines about the devices of ranks, and with -v about the names that came from PyTorch."""
    lines = []
    is_silent = config.option.collectonly or config.option.verbose < 0
    if not is_silent and any(_has_ranks(item) for item in items):
        from torch_testing_ext._pytest_ranks import item_in_parent

        lines.append(item_in_parent.where_ranks_run(config.rootpath))
    if config.getoption(OPTION) and config.option.verbose > 0:
        from torch_testing_ext.upstream import drop_in

        lines += drop_in.explain().splitlines()
    return lines


def _has_ranks(item: Any) -> bool:
    return item.get_closest_marker(_MARK) is not None


def _install() -> None:
    from torch_testing_ext.upstream import drop_in

    drop_in.install()


def _is_launched() -> bool:
    """Whether a launcher such as torchrun may have started this process. Modules that are imported then find out."""
    return launcher_variables.may_be_rank(os.environ)


_EXPLANATIONS = (
    "world_size(size, *, backend=None, devices='auto', timeout=None, isolated=False, init=None, scope='function', "
    "nodes=1): run "
    "the test in this many ranks, each a fresh process; a list of sizes makes one test for each. "
    "backend: of the group that dist_env creates. init: a function that creates the group instead. "
    "devices: 'auto', an accelerator for each rank if there are enough, else the CPU; 0, the CPU; "
    "a number: skip the test on a machine with fewer. timeout: in seconds. "
    "scope: 'class' or 'module', whose tests share ranks. nodes: the machines that the ranks seem to be on. "
    "isolated: run it in a new interpreter, not in ranks forked from pytest's process (torch_testing_ext)",
    "faults(*faults, within=None, must_reach=()): what happens to ranks of the test; the faults are those of "
    "torch_testing_ext.faults (torch_testing_ext)",
    "layouts(*layouts, dtypes=(torch.float64,), data=..., sequence=..., save_after=1, generic=True, seed=1234, "
    "timeout=None, devices=0, strict=False): train in the ranks of each layout, such as 'dp=2 tp=2', and compare every "
    "tensor with the training in one rank; each layout is a test (torch_testing_ext)",
    "standalone(*, timeout=None): run the test and all of its fixtures in a new interpreter (torch_testing_ext)",
)


@pytest.fixture
def dist_env() -> Iterator[DistEnv]:
    """The rank that runs a test with the mark `world_size`, with a process group: a `DistEnv` of `ranks`."""
    in_rank = sys.modules.get("torch_testing_ext._pytest_ranks.item_in_rank")
    if in_rank is None or not in_rank.is_rank():
        pytest.fail(
            "dist_env exists only in ranks, but request.getfixturevalue asked for it in the parent process. Name it as "
            "an argument of the test or fixture, or ask for it in the code of the fixture itself, so that it is set up "
            "in the ranks",
            pytrace=False,
        )
    yield from in_rank.this_dist_env()


@pytest.fixture
def ranks() -> Ranks | None:
    """The rank that runs a test with the mark `world_size`, without a process group; None in other tests."""
    in_rank = sys.modules.get("torch_testing_ext._pytest_ranks.item_in_rank")
    if in_rank is None or not in_rank.is_rank():
        return None
    rank: Ranks = in_rank.this_rank()
    return rank


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> Layout:
    """The layout under which a test with the mark `layouts` trains: a `Layout`, which each rank has its own of."""
    if request.node.get_closest_marker(_LAYOUTS) is None:
        pytest.fail("layout exists only in tests with the mark layouts: @pytest.mark.layouts('tp=2')", pytrace=False)
    # Each rank calls the test with its own.
    return typing.cast("Layout", None)


@pytest.fixture(name="traffic")
def _traffic() -> Traffic:
    """A context manager that records the communication of a block: `with traffic(model) as seen`."""
    from torch_testing_ext import traffic

    return traffic.traffic


@pytest.fixture(name="spawn")
def _spawn() -> Spawn:
    """A function that runs another in ranks: `spawn(function, world_size, *args)`."""
    from torch_testing_ext import ranks

    return ranks.spawn


@pytest.fixture(name="run_script")
def _run_script() -> RunScript:
    """A function that runs a script in ranks: `run_script(path, *args, world_size=4)`."""
    from torch_testing_ext import ranks

    return ranks.run_script


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker(_MARK) is not None:
        from torch_testing_ext._pytest_ranks import marks

        marks.expand_world_sizes(metafunc)
    if metafunc.definition.get_closest_marker(_LAYOUTS) is not None:
        from torch_testing_ext._pytest_ranks import layouts_of_tests

        layouts_of_tests.expand_layouts(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    facts = {name: fact for aspect in ASPECTS for name, fact in aspect.facts(_Asked(session.config.option)).items()}
    if facts:
        from torch_testing_ext._pytest_ranks.pytest_internals import configuration

        for name, fact in facts.items():
            configuration.add_property(session.config, name, fact)


def _concerns_us(item: Any) -> bool:
    """Whether a test has a mark of ours or a fixture of ranks. Each step asks again, since hooks add marks."""
    if "dist_env" in getattr(item, "fixturenames", ()):
        return True
    return any(mark.name in _MARKS for mark in item.iter_markers())


# Neither first, since pytest's own marks, such as `skip`, and hooks that mark tests have their effect before; nor last,
# since this is before the fixtures are set up.
def pytest_runtest_setup(item: Any) -> None:
    """Prepare a test with a mark of ours, and let its call run it in ranks, or in a new interpreter."""
    size = SIZE.value()
    is_of_unittest = hasattr(item, "addError") and not hasattr(item, "command_of")
    if is_of_unittest and "torch_testing_ext._testing.bases.invocation" in sys.modules:
        from torch_testing_ext._pytest_ranks import command_by_pytest

        # It is the result object of a test of unittest, which asks it. The runner has given it the command before.
        item.command_of = lambda test: command_by_pytest.command(item)
    if size is not None or _concerns_us(item) or item.get_closest_marker(_LAYOUTS) is not None:
        from torch_testing_ext._pytest_ranks import ways_of_tests

        ways_of_tests.choose_way(item, size)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, pytest.FixtureLookupError) and error.msg is None and error.argname:
        from torch_testing_ext._pytest_ranks import refusals
        from torch_testing_ext._pytest_ranks.pytest_internals import item_fixtures

        error.msg = refusals.misspelt_fixture(error.argname, item_fixtures.fixtures_of(globals()))
    report = yield
    # pytest gives the exceptions of tests of unittest only now.
    error = call.excinfo.value if call.excinfo is not None else None
    is_refusal = getattr(error, "is_refusal", False)
    if call.when != "teardown" and (report.passed or error is not None) and (is_refusal or _concerns_us(item)):
        from torch_testing_ext._pytest_ranks import marks

        if is_refusal or (report.passed and not marks.were_read(item)):
            from torch_testing_ext._pytest_ranks import refusals

            refusals.report_refusal(report, error, item)
        if call.when == "call":
            report.place_of_ranks = item.stash.get(marks.PLACE, "")
    launch = sys.modules.get("torch_testing_ext.launch")
    outcome = getattr(error, "outcome", None)
    if launch is not None and report.failed and isinstance(outcome, launch.TestOutcome):
        from torch_testing_ext._pytest_ranks import shown_verdicts

        shown_verdicts.show(report, call.excinfo, item)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_report_teststatus(report: Any, config: pytest.Config) -> Generator[None, Any, Any]:
    """Show a refused test once for all of its parameters, and the devices of the ranks of other tests."""
    status = yield
    if getattr(report, "is_refused_again", False):
        return "refused", "E", ("REFUSED", {"red": True})
    place = getattr(report, "place_of_ranks", "")
    if not place or config.option.verbose <= 0:
        return status
    category, letter, word = status
    if isinstance(word, tuple):
        word, markup = word
        return category, letter, (f"{word} ({place})", markup)
    return category, letter, f"{word} ({place})"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say on what ranks ran, under pytest-xdist: the process with the terminal collects nothing there."""
    if not config.pluginmanager.hasplugin("dsession") or config.option.verbose < 0:
        return
    reports = [report for several in terminalreporter.stats.values() for report in several]
    places = Counter(place for report in reports if (place := getattr(report, "place_of_ranks", "")))
    if places:
        ran = ", ".join(f"{place} ({words.count(number, 'test')})" for place, number in places.items())
        terminalreporter.write_line(f"ranks ran on: {ran}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: Any) -> None:
    in_rank = sys.modules.get("torch_testing_ext._pytest_ranks.item_in_rank")
    if in_rank is not None and in_rank.is_rank() and not getattr(report, "is_of_all_ranks", False):
        in_rank.on_report(report)
    if report.failed:
        from torch_testing_ext._pytest_ranks.pytest_internals.failure_texts import colour

        colour(report)
