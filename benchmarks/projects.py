"""Compare pytest and torchtest in projects of other people's shapes: the same ids, the same outcomes.

    python benchmarks/projects.py [NAME ...] [--installed PACKAGE ...] [--sources PROJECT ...] [--verbose]

Without a name, it makes all projects of `project_shapes.py`, each in a folder of its own. `--installed` compares the
tests that come with an installed package, such as numpy.linalg; `--sources` those of a folder, or of a source
distribution, such as attrs==26.1.0, which pip downloads. A project whose plugins are not installed is left out, by
name. The exit code is 1 if the two differ anywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from project_shapes import SHAPES, Shape

# A plugin that writes how each test has ended, by id.
RECORDER = """
import json, os
ENDS = {}
def pytest_runtest_logreport(report):
    if getattr(report, "context", None) is not None and not report.failed:
        return
    known = ENDS.get(report.nodeid)
    if report.failed:
        ENDS[report.nodeid] = "failed"
    elif report.outcome == "rerun":
        ENDS.pop(report.nodeid, None)
    elif report.skipped and known != "failed":
        ENDS[report.nodeid] = "expected failure" if hasattr(report, "wasxfail") else "skipped"
    elif report.when == "call" and known is None:
        ENDS[report.nodeid] = "passed"
def pytest_collectreport(report):
    if report.failed:
        ENDS[report.nodeid] = "failed"
    elif report.skipped:
        ENDS[report.nodeid] = "skipped"
def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        with open(os.environ["ENDS_OF_TESTS"], "w") as file:
            json.dump(ENDS, file)
"""
# In pytest, both are a failure, or an error of a set-up or tear-down.
FAILED = ("failed", "error", "timeout", "crashed", "unexpected success")
TIMEOUT = 900.0
# Runs torchtest with these words, in a folder and with more variables.
Torchtest = Callable[[Sequence[str], Path, Mapping[str, str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Ends:
    """The outcome of each test, by its id; and whether the whole run was green."""

    outcomes: Mapping[str, str]
    is_green: bool
    said: str


def by_pytest(folder: Path, environ: Mapping[str, str]) -> Ends:
    """Run the tests of a project with pytest."""
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary, "recorder_of_ends.py").write_text(RECORDER)
        file = Path(temporary, "ends.json")
        path = os.pathsep.join(filter(None, (environ.get("PYTHONPATH"), temporary)))
        more = {"PYTHONPATH": path, "ENDS_OF_TESTS": str(file)}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "recorder_of_ends",
            "--continue-on-collection-errors",
            "-p",
            "no:cacheprovider",
        ]
        done = _run(_without_folder(command), folder, {**environ, **more})
        outcomes = json.loads(file.read_text()) if file.exists() else {}
    return Ends(outcomes, done.returncode == 0, done.stdout + done.stderr)


def ids_by_pytest(folder: Path, environ: Mapping[str, str]) -> list[str]:
    """The ids that pytest lists."""
    # Not -q: with one in addopts, pytest prints counts.
    command = [sys.executable, "-m", "pytest", "--collect-only", "--verbosity=-1", "-p", "no:cacheprovider"]
    done = _run(_without_folder(command), folder, environ)
    return sorted(line for line in done.stdout.splitlines() if "::" in line and not line.startswith(("ERROR", "  ")))


def by_torchtest(folder: Path, environ: Mapping[str, str], run: Torchtest | None = None) -> Ends:
    """Run the tests of a project with torchtest. `run`: how it is started, if not as users do."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "results.json")
        words = (f"--results={file}", f"--cache={temporary}/cache")
        done = run(words, folder, environ) if run else _run(_torchtest(*words), folder, environ)
        results = json.loads(file.read_text()) if file.exists() else {"tests": []}
    outcomes = {test["id"]: end_of(test["outcome"]) for test in results["tests"]}
    return Ends(outcomes, done.returncode == 0, done.stdout + done.stderr)


def ids_by_torchtest(folder: Path, environ: Mapping[str, str]) -> list[str]:
    """The ids that torchtest lists."""
    with tempfile.TemporaryDirectory() as temporary:
        done = _run(_torchtest("--list=json", f"--cache={temporary}/cache"), folder, environ)
    tests = json.loads(done.stdout)["tests"] if done.stdout.startswith("{") else []
    return sorted(test["id"] for test in tests if "::" in test["id"])


def end_of(outcome: str) -> str:
    """The outcome of torchtest in the words of pytest."""
    if outcome in FAILED:
        return "failed"
    return "passed" if outcome in ("leaked", "flaky") else outcome


def _torchtest(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch_testing_ext", "--warm=off", *words]


def _without_folder(command: list[str]) -> list[str]:
    """A command that does not put the working directory into sys.path, as the script `pytest` does not."""
    return [command[0], "-P", *command[1:]] if sys.version_info >= (3, 11) else command


def _run(command: list[str], folder: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def write(shape: Shape, folder: Path) -> Path:
    """Make the files of a project. Returns the folder in which its tests are run."""
    for name, text in shape.files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / shape.run_in


def differences(theirs: Ends, ours: Ends) -> list[str]:
    """What differs between the outcomes of pytest and those of torchtest."""
    found = []
    for name in sorted({*theirs.outcomes, *ours.outcomes}):
        expected = theirs.outcomes.get(name, "not run")
        actual = ours.outcomes.get(name, "not run")
        if expected != actual:
            found.append(f"{name}: {expected} in pytest, {actual} in torchtest")
    if theirs.is_green != ours.is_green:
        color = {True: "green", False: "red"}
        found.append(f"the run is {color[theirs.is_green]} in pytest, {color[ours.is_green]} in torchtest")
    return found


def missing_of(shape: Shape) -> list[str]:
    """The modules that a project needs and that are not installed."""
    return [name for name in shape.needs if importlib.util.find_spec(name) is None]


def compare(folder: Path, environ: Mapping[str, str], verbose: bool = False) -> tuple[int, list[str]]:
    """The number of tests that pytest lists in a project, and what differs."""
    theirs = by_pytest(folder, environ)
    ours = by_torchtest(folder, environ)
    found = differences(theirs, ours)
    expected, actual = ids_by_pytest(folder, environ), ids_by_torchtest(folder, environ)
    if expected != actual:
        found.append(f"the list differs in {sorted({*expected} ^ {*actual})[:5]}")
    if not theirs.outcomes:
        found.append("pytest runs no test, so nothing is compared")
    if verbose and found:
        print(theirs.said, ours.said, sep="\n-----\n")
    return len(expected), found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--installed", nargs="+", default=[], metavar="PACKAGE")
    parser.add_argument("--sources", nargs="+", default=[], metavar="PROJECT")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    unknown = set(options.names) - set(SHAPES)
    if unknown:
        parser.error(f"no project has the name {', '.join(sorted(unknown))}: there are {', '.join(SHAPES)}")
    names = options.names or ([] if options.installed or options.sources else list(SHAPES))
    differing = 0
    left_out = 0
    for name in names:
        shape = SHAPES[name]
        if missing := missing_of(shape):
            left_out += 1
            print(f"{name:<28} left out: {', '.join(missing)} not installed")
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = write(shape, Path(temporary).resolve())
            differing += _tell(name, *compare(folder, shape.environ, options.verbose))
    real: list[tuple[str, Callable[[str, Path], Path]]]
    real = [(package, tests_of_package) for package in options.installed]
    real += [(project, sources_of) for project in options.sources]
    for name, copy in real:
        with tempfile.TemporaryDirectory() as temporary:
            folder = copy(name, Path(temporary).resolve())
            differing += _tell(name, *compare(folder, {}, options.verbose))
    total = len(names) + len(real) - left_out
    print(f"{total - differing} of {total} alike, {left_out} left out")
    return 1 if differing else 0


def _tell(name: str, tests: int, found: list[str]) -> bool:
    line = f"{name:<28} {tests:>6} tests {'differ' if found else 'alike'}"
    print(line, *found[:20], sep="\n    " if found else "", flush=True)
    return bool(found)


def tests_of_package(package: str, folder: Path) -> Path:
    """A folder with the tests of an installed package: some tests write beside themselves."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed")
    tests = Path(spec.origin).parent / "tests"
    if not tests.is_dir():
        raise SystemExit(f"{package} is installed without its tests")
    shutil.copytree(tests, folder / "tests")
    return folder


def sources_of(project: str, folder: Path) -> Path:
    """A copy of a folder, or the content of the source distribution that a requirement names."""
    if Path(project).is_dir():
        return Path(shutil.copytree(project, folder / "project"))
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=:all:", project]
    done = _run(command, folder, {})
    archives = [*folder.iterdir()]
    if done.returncode or len(archives) != 1:
        raise SystemExit(f"pip cannot download {project}:\n{done.stderr}")
    shutil.unpack_archive(archives[0], folder / "project")
    return next((folder / "project").iterdir())


if __name__ == "__main__":
    sys.exit(main())
