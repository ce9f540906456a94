"""Do the real tests of other projects have the same outcomes after `python -m torch_testing_ext.moving`?

    python benchmarks/moving/compare.py PROJECT CHECKOUT [--python PYTHON] [--only WORD]

Copies a checkout of the project, runs its tests in the project's own way, converts the copy, runs them in ours, and
compares them one by one. PYTHON has the project, what its tests need, and this package. README.md says how to make it.
The exit code is 1 if fewer than 98 % have the same outcome, or if one has vanished.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TARGET = 0.98
OURS = "torch_testing_ext.pytest_plugin"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PYTEST_", "TORCH_TESTING_EXT_")
WORLD_SIZE = re.compile(r"world_size=\d+-|-?world_size=\d+")  # in a name, for a list in a mark
SEVERITY = ("passed", "skipped", "failed")


@dataclass(frozen=True)
class Suite:
    """Tests of a project, and how they are run before and after."""

    paths: tuple[str, ...]  # converted
    tests: tuple[str, ...]  # run
    environ: Mapping[str, str] = field(default_factory=dict)
    folder: str = "."


def _each(form: str, names: str) -> tuple[str, ...]:
    return tuple(form.format(name) for name in names.split())


SUITES = {
    "deepspeed": Suite(
        ("tests/unit",),
        ("unit/comm/test_dist.py", "unit/utils/test_groups.py", "unit/checkpoint/test_tag_validation.py"),
        environ={"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4"},
        folder="tests",
    ),
    "torchrec": Suite(
        ("torchrec",),
        (
            *_each("torchrec/distributed/{}/tests", "composable model_tracker"),
            *_each("torchrec/distributed/tests/test_{}.py", "2d_sharding dist_data init_parameters sharding_plan"),
            *_each("torchrec/distributed/tests/test_{}.py", "mc_embedding mc_embeddingbag shards_wrapper tensor_pool"),
            *("torchrec/distributed/planner/tests/test_types.py", "torchrec/metrics/tests/test_metric_module.py"),
        ),
    ),
    "torchtitan": Suite(
        ("tests/unit_tests",),
        _each("tests/unit_tests/test_{}.py", "loss_dtensor embedding fsdp_moe_sharding"),
    ),
}


def main() -> int:
    options = _options()
    suite, python = SUITES[options.project], str(Path(options.python).absolute())
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "checkout")
        shutil.copytree(options.checkout, copy, ignore=shutil.ignore_patterns(".git"))
        before = _run(suite, python, copy, "before", options.only)
        command = [python, "-m", "torch_testing_ext.moving", options.project]
        done = subprocess.run([*command, *suite.paths], cwd=copy, capture_output=True, text=True)
        print(done.stderr, end="", file=sys.stderr)
        after = _run(suite, python, copy, "after", options.only)
    return _compare(options.project, *before, *after)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", choices=sorted(SUITES))
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--python", default=sys.executable, help="interpreter of an environment with the project")
    parser.add_argument("--only", default="", help="an expression for pytest's -k")
    return parser.parse_args()


def _run(suite: Suite, python: str, copy: Path, when: str, only: str) -> tuple[dict[str, str], float]:
    """Run the tests. Returns the outcome of each, and the seconds."""
    more = [] if when == "after" else ["-p", f"no:{OURS}"]
    report = copy.with_name(f"{when}.xml")
    command = [python, "-m", "pytest", *suite.tests, *more]
    command += ["-k", only] if only else []
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1", "-q"]
    command += ["-o", "addopts="]  # options of plugins that the comparison does not need
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    environ |= {"PYTHONPATH": str(copy / suite.folder), "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    environ |= suite.environ
    began = time.monotonic()
    with copy.with_name(f"{when}.log").open("w") as log:
        subprocess.run(command, cwd=copy / suite.folder, env=environ, stdout=log, stderr=subprocess.STDOUT)
    seconds = time.monotonic() - began
    if not report.exists():
        sys.exit(f"no report {when}:\n{copy.with_name(f'{when}.log').read_text()[-3000:]}")
    return _outcomes(report), seconds


def _outcomes(report: Path) -> dict[str, str]:
    """The outcome of each test: the worst, of one that has several world sizes."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{WORLD_SIZE.sub('', case.get('name', '')).replace('[]', '')}"
        kinds = {each.tag for each in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[name] = max(outcome, found.get(name, outcome), key=SEVERITY.index)
    return found


def _compare(project: str, before: dict[str, str], slow: float, after: dict[str, str], fast: float) -> int:
    same = [name for name in before if after.get(name) == before[name]]
    vanished = sorted(before.keys() - after.keys())
    different = sorted(name for name in before.keys() & after.keys() if after[name] != before[name])
    for name in different:
        print(f"  {before[name]} -> {after[name]}: {name}")
    for name in vanished:
        print(f"  vanished ({before[name]}): {name}")
    count = {kind: sum(outcome == kind for outcome in before.values()) for kind in SEVERITY}
    counts = ", ".join(f"{number} {kind}" for kind, number in count.items())
    new = len(after.keys() - before.keys())
    print("| project | tests | before | same | different | vanished | new | seconds before | after |")
    print(f"| {project} | {len(before)} | {counts} | {len(same)} | {len(different)} | {len(vanished)} | {new} ", end="")
    print(f"| {slow:.0f} | {fast:.0f} |")
    return 0 if before and not vanished and len(same) >= TARGET * len(before) else 1


if __name__ == "__main__":
    sys.exit(main())
