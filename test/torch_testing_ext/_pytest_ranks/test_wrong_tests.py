"""Mistakes of newcomers in tests: both runners say the cause first, with the line of the user and the remedy, once."""

from __future__ import annotations

import re

import pytest
from kit.files import subject
from kit.processes import clean_environ
from kit.pytest_runs import run_pytest
from kit.warm import run_warm

SOURCE = subject(__file__, "wrong_tests.py")
# By test: what its title begins with, perhaps after `all 2 ranks raised` or the exception, and the remedy.
MISTAKES = {
    "test_world_size_is_text": ("the world size is '2'", "must be a number of ranks"),
    "test_argument_misspelt": ("the mark world_size has no argument timeot", "Did you mean: timeout?"),
    "test_devices": ("devices is 'gpu'", "must be 'auto', or a number"),
    "test_backend": ("backend is 'glo'", "Did you mean: gloo?"),
    "test_too_many": ("the world size is 5000", "at most 1024"),
    "test_mark_misspelt": ("the test uses dist_env", "(it has the mark wrld_size: a typo?)"),
    "test_no_mark": ("the test uses dist_env", "Add @pytest.mark.world_size(2)"),
    "test_fixture_misspelt": ("fixture 'dist_evn' not found", "Did you mean: dist_env?"),
    "test_fixture_too_wide": ("fixture 'shared' has scope 'session'", "Give the fixture scope 'function'"),
    "test_group_twice": ("trying to initialize the default process group twice", "leave out init_process_group"),
    "test_no_group": ("Default process group has not been initialized", "ask for dist_env"),
    "test_cuda": ("Torch not compiled with CUDA enabled", "use dist_env.device"),
    "test_subtest": ("in subtest (i=1): AssertionError: assert", " == 5"),
    "test_spawn_none": ("world_size is 0", "must be a number of ranks"),
    "test_spawn_devices": ("devices is 'gpu'", "must be 'auto', or a number"),
    "test_spawn_lacks": ("each rank would call function_of_two(rank)", "as in spawn(function_of_two, 2, ...)"),
    "test_spawn_too_much": ("each rank would call function(rank, 10)", "its signature is function(rank)"),
    "test_no_script": ("there is no script", "missing.py"),
    "test_launcher": ("launcher is 'mpirun'", "one of (None, 'torchrun')"),
    "test_operation": ("call(1, 'allreduce'): there is no such operation", "Did you mean: all_reduce"),
    "test_rank_of_fault": ("kill(rank=-1): a rank is a number", "0 or more"),
    "test_fault_without_length": ("slow('a while')", "give the seconds that it lasts"),
}
# Before the cause: whom it concerns, and the exception.
BEFORE = r"(E +)?(in the set-up: )?(all 2 ranks (raised|failed)(: | ))?(\w+(Error|Exception): )?"
needs_subtests = pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="this pytest has no fixture subtests")
EACH = [pytest.param(name, marks=needs_subtests if name == "test_subtest" else ()) for name in MISTAKES]
pytestmark = pytest.mark.slow


def line_of(name: str) -> int:
    """The line with the comment `here` of a test, or of the function just before it that its ranks call."""
    lines = SOURCE.splitlines()
    if name == "test_no_group":
        return lines.index("    dist.all_reduce(torch.ones(1))  # here") + 1
    (at,) = (number for number, line in enumerate(lines) if line.startswith(f"def {name}("))
    while at > 0 and lines[at - 1]:
        at -= 1
    return next(number for number, line in enumerate(lines[at:], at + 1) if line.endswith("# here"))


@pytest.fixture(scope="module")
def by_torchtest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What torchtest prints of each failure, by the name of the test."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "test_wrong.py").write_text(SOURCE)
    environ = clean_environ(TMPDIR=str(folder))
    done = run_warm("-m", "torch_testing_ext", "--warm=off", cwd=folder, env=environ)
    parts = re.split(r"(?m)^\[ *\d+/\d+\] .*::(\w+)\n", done.stdout.partition("\n====")[0])
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def by_pytest() -> dict[str, str]:
    """What pytest prints of each failure, by the name of the test."""
    text = run_pytest({"test_wrong.py": SOURCE}).text.partition("\n==== warnings")[0]
    parts = re.split(r"(?m)^_+ (?:ERROR at setup of )?(\w+) _+\n", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("runner", ["by_torchtest", "by_pytest"])
@pytest.mark.parametrize("name", EACH)
def test_mistake(request: pytest.FixtureRequest, name: str, runner: str) -> None:
    message = request.getfixturevalue(runner)[name].strip()
    cause, remedy = MISTAKES[name]
    titles = [line for line in message.splitlines() if re.match(BEFORE + re.escape(cause), line)]
    assert titles, message
    assert remedy in titles[0], message
    assert re.search(rf"test_wrong\.py(:|, line ){line_of(name)}\b", message), message
    assert "Refused" not in message
    # pytest shows the exception of a traceback below it, with an E.
    of_traceback = [title for title in titles if title.startswith("E ")]
    assert len(titles) - len(of_traceback) <= 1, "told again"
    assert runner == "by_pytest" or message.startswith(titles[0]), "the cause comes first"
    assert "/torch_testing_ext/" not in message, "a line of this package"
