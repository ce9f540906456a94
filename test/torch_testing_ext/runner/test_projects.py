"""Projects of other people's shapes: torchtest has the outcomes of pytest. `benchmarks/projects.py` has all shapes."""

import sys
from pathlib import Path

import pytest
from kit.processes import clean_environ
from kit.warm import run_torchtest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import projects
finally:
    sys.path.remove(str(BENCHMARKS))

pytestmark = pytest.mark.slow

SOME = (
    *("flat", "src_layout", "monorepo", "empty_pytest_ini", "names_of_tests", "collect_ignore", "warnings_are_errors"),
    *("hooks_skip", "unittest_only", "generated", "doctest_modules", "custom_collector"),
)


def in_torchtest(words, folder, environ):
    return run_torchtest(*words, cwd=folder, env={**clean_environ(), **environ})


@pytest.mark.parametrize("name", SOME)
def test_a_project(name, tmp_path):
    """Runs both as users do, in interpreters of their own; the preloaded server of torchtest is that of the tests."""
    shape = projects.SHAPES[name]
    assert not projects.missing_of(shape)
    folder = projects.write(shape, tmp_path)
    theirs = projects.by_pytest(folder, shape.environ)
    ours = projects.by_torchtest(folder, shape.environ, in_torchtest)
    assert projects.differences(theirs, ours) == [], f"{theirs.said}\n-----\n{ours.said}"
