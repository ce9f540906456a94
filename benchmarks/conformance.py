"""Run the corpus of conformance on PyTorch's bases and on ours, and compare test by test.

    python benchmarks/conformance.py [--record | --recorded] [--drop-in] [--spawn] [--slots N] [FILE ...]

The corpus, test/torch_testing_ext/conformance/corpus/, consists of test files written for torch.testing._internal; a
FILE is one of them, without its folder and ending. Ours runs them with rewritten imports, or with --drop-in as they
are. PyTorch's side takes minutes; with --spawn, where its ranks are new interpreters as its bases have it, an hour. So
--record keeps its outcomes in outcomes/ beside the corpus, a file for each version of torch, and --recorded compares
ours with those. The rules and the allowed differences are in comparing.py there. The exit code is 1 for any other
difference.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFORMANCE = ROOT / "test" / "torch_testing_ext" / "conformance"
sys.path.insert(0, str(CONFORMANCE))

import comparing  # noqa: E402
import worker  # noqa: E402

CORPUS = CONFORMANCE / "corpus"
OUTCOMES = CONFORMANCE / "outcomes"
DOCS = ROOT / "docs" / "guides" / "test-classes.md"
NOTES = "notes"  # the corpus's helper
Results = dict[str, dict[str, Any]]  # by file: what its worker wrote


@dataclass(frozen=True)
class Line:
    """What came out for one test."""

    test: str
    theirs: str
    ours: str
    allowed: bool
    wrong: list[str]

    @property
    def is_test(self) -> bool:
        """False for the notes of a class's hooks."""
        return self.ours != comparing.NOT_RUN


def torch_version() -> str:
    return ".".join(version("torch").split(".")[:2])


def files_of_corpus() -> list[str]:
    return sorted(path.stem for path in CORPUS.glob("*.py") if path.stem != NOTES)


def declared(name: str, variable: str) -> Any:
    """What a corpus file assigns to a variable at its top, without importing it; an empty table if nothing."""
    for statement in ast.parse((CORPUS / f"{name}.py").read_text()).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [variable]:
            value = ast.literal_eval(statement.value)
            return {f"{name}.{test}": one for test, one in value.items()} if isinstance(value, dict) else value
    return {}


def too_new(name: str, torch: str) -> str | None:
    """The version of torch that a whole file is for, if this one is older."""
    since = declared(name, "NEWER")
    return since if isinstance(since, str) and _number(torch) < _number(since) else None


# -- run


def run(side: str, folder: Path, names: Sequence[str], slots: int) -> Results:
    """Run files in one worker."""
    with tempfile.TemporaryDirectory(prefix="conformance") as temporary:
        results = Path(temporary)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": temporary}
        environment.pop("WORLD_SIZE", None)
        command = [sys.executable, *worker.arguments_of(side, folder, results, slots, names)]
        done = subprocess.run(command, cwd=temporary, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return {name: _result_of(results, name) for name in names}


def _result_of(results: Path, name: str) -> dict[str, Any]:
    path, log = results / f"{name}.json", results / f"{name}.log"
    output = log.read_text(errors="replace") if log.exists() else ""
    if path.exists():
        result: dict[str, Any] = json.loads(path.read_text())
    else:
        result = {"broken": "its process ended before its last test", "seconds": 0.0, "tests": {}}
    return {**result, "output": output}


def run_on_ours(names: Sequence[str], slots: int, drop_in: bool) -> Results:
    if drop_in:
        return run("drop-in", CORPUS, names, slots)
    from torch_testing_ext.upstream.mapping import Side
    from torch_testing_ext.upstream.rewriting import rewrite_file

    with tempfile.TemporaryDirectory(prefix="rewritten") as temporary:
        for name in (*names, NOTES):
            path = CORPUS / f"{name}.py"
            Path(temporary, path.name).write_bytes(rewrite_file(path.read_bytes(), Side.OURS, path).source)
        return run("ours", Path(temporary), names, slots)


# -- PyTorch's outcomes


def keep(results: Results, torch: str) -> int:
    """Write the outcomes of PyTorch's side; those of files that did not run now stay. Return the exit code."""
    before = recorded_outcomes(torch)
    broken = {name: result for name, result in results.items() if result["broken"]}
    for name in results.keys() - broken.keys():
        before[name] = {test: comparing.recorded(one) for test, one in results[name]["tests"].items()}
    kept = {name: before[name] for name in files_of_corpus() if name in before}
    (OUTCOMES / f"torch-{torch}.json").write_text(_one_test_a_line(kept))
    for name, result in broken.items():
        print(f"{name} was not recorded: {result['broken']}\n{result['output']}")
    return 1 if broken else 0


def _one_test_a_line(kept: Mapping[str, Mapping[str, Any]]) -> str:
    files = []
    for name, tests in kept.items():
        lines = (f"  {json.dumps(test)}: {json.dumps(tests[test], sort_keys=True)}" for test in sorted(tests))
        files.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(files) + "\n}\n"


def recorded_outcomes(torch: str) -> dict[str, dict[str, Any]]:
    path = OUTCOMES / f"torch-{torch}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def nearest_recorded(torch: str) -> str:
    """The newest version with recorded outcomes that is not newer than this one; else the oldest."""
    known = sorted((path.stem.removeprefix("torch-") for path in OUTCOMES.glob("torch-*.json")), key=_number)
    if not known:
        raise SystemExit(f"{OUTCOMES} has no outcomes: --record them first")
    return next((one for one in reversed(known) if _number(one) <= _number(torch)), known[0])


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


# -- compare


def compare(name: str, torch: str, theirs: Mapping[str, Any], ours: dict[str, Any]) -> list[Line]:
    """Compare one file."""
    if ours["broken"]:
        return [Line(name, "", "", False, [f"ours did not run: {ours['broken']}", ours["output"][-2000:]])]
    stricter, newer = declared(name, "STRICTER"), declared(name, "NEWER")
    lines = []
    named = newer if isinstance(newer, dict) else ()
    for test in sorted({*theirs, *ours["tests"], *stricter, *named}):
        one, other = theirs.get(test), ours["tests"].get(test)
        since = newer.get(test) if isinstance(newer, dict) else newer
        if since is not None and _number(torch) < _number(since):
            one = recorded_outcomes(since).get(name, {}).get(test)
        allowed = comparing.Allowed(*stricter[test]) if test in stricter else None
        wrong = comparing.judge(one, other, allowed)
        shown = [comparing.outcome_of(side) if side else "" for side in (one, other)]
        lines.append(Line(test, *shown, allowed is not None, wrong))
    return lines


def undocumented(names: Sequence[str]) -> list[str]:
    """The sentences of allowed differences that the documentation does not have."""
    text = " ".join(re.sub(r"\s+", " ", DOCS.read_text()).split())
    found = []
    for name in names:
        for test, (sentence, _) in declared(name, "STRICTER").items():
            if sentence not in text:
                found.append(f"{test}: {DOCS.name} does not say {sentence!r}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--record", action="store_true", help="run PyTorch's side only, and keep its outcomes")
    how.add_argument("--recorded", action="store_true", help="compare ours with the outcomes that were kept")
    parser.add_argument("--drop-in", action="store_true", help="run ours by drop-in, not with rewritten imports")
    parser.add_argument("--spawn", action="store_true", help="start PyTorch's ranks as new interpreters: very slow")
    parser.add_argument("--slots", type=int, default=2, metavar="N", help="run N files at once (default: 2)")
    parser.add_argument("--output", action="store_true", help="print what the files printed on our side")
    parser.add_argument("files", nargs="*", metavar="FILE", help="these files of the corpus (default: all)")
    options = parser.parse_args(arguments)
    names = options.files or files_of_corpus()
    if unknown := sorted({*names} - {*files_of_corpus()}):
        parser.error(f"the corpus has no {', '.join(unknown)}; it has {', '.join(files_of_corpus())}")
    torch = torch_version()

    if options.recorded:
        source = nearest_recorded(torch)
        theirs: dict[str, Any] = recorded_outcomes(source)
        print(f"torch {torch}, compared with the outcomes recorded on torch {source}")
    else:
        runnable = [name for name in names if not too_new(name, torch)]
        results = run("pytorch-spawn" if options.spawn else "pytorch", CORPUS, runnable, options.slots)
        source = torch
        for name, result in results.items():
            print(f"PyTorch's bases: {name}: {len(result['tests'])} tests in {result['seconds']:.0f} s", flush=True)
        if options.record:
            return keep(results, torch)
        theirs = {
            name: {test: comparing.recorded(one) for test, one in result["tests"].items()}
            for name, result in results.items()
        }
        for name, result in results.items():
            if result["broken"]:
                print(f"{name}: {result['broken']}")
    ours = run_on_ours(names, options.slots, options.drop_in)
    if options.output:
        for name in names:
            print(f"--- {name}\n{ours[name]['output']}")
    wrong = undocumented(names)
    for name in names:
        if since := too_new(name, source):
            theirs[name] = recorded_outcomes(since).get(name, {})
    lines = {name: compare(name, source, theirs.get(name, {}), ours[name]) for name in names}
    _print_table(lines, ours)
    for name in names:
        wrong += [f"{line.test}: {text}" for line in lines[name] for text in line.wrong]
    print("\n".join(wrong))
    total = sum(line.is_test for found in lines.values() for line in found)
    allowed = sum(line.allowed and not line.wrong for found in lines.values() for line in found)
    print(f"{total} tests, {allowed} stricter as documented, {len(wrong)} differences")
    return 1 if wrong else 0


def _print_table(lines: Mapping[str, Sequence[Line]], ours: Results) -> None:
    print(f"{'file':<36}{'tests':>6}{'alike':>7}{'stricter':>10}{'differ':>8}{'seconds':>9}  outcomes")
    for name, found in lines.items():
        differ = sum(bool(line.wrong) for line in found)
        allowed = sum(line.allowed and not line.wrong for line in found)
        outcomes = ", ".join(
            f"{count} {outcome}" for outcome, count in Counter(line.ours for line in found).most_common()
        )
        counts = f"{len(found):>6}{len(found) - differ - allowed:>7}{allowed:>10}{differ:>8}"
        print(f"{name:<36}{counts}{ours[name]['seconds']:>9.1f}  {outcomes}")


if __name__ == "__main__":
    sys.exit(main())
