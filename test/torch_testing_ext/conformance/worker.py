"""Runs files of the corpus and writes their tests' outcomes as JSON: one interpreter, a forked child for each file.

    python worker.py SIDE FOLDER RESULTS SLOTS FILE...

SIDE is `ours` (files with rewritten imports), `drop-in` (files as they are give our classes), `pytorch`, or
`pytorch-spawn`. PyTorch's bases start each rank as a new interpreter, which imports torch for seconds; on side
`pytorch` multiprocessing forks it off a fork server instead, which has just imported torch. FOLDER has the files. Each
FILE.py becomes RESULTS/FILE.json: the tests with their outcomes and notes, and the seconds that the file took.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing.context
import os
import re
import signal
import sys
import time
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Generous: PyTorch's side takes seconds for each test, on a busy machine more.
MOST_SECONDS = 900
# In the text of an exception from ranks: the last line of each traceback.
EXCEPTION_LINE = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Interrupt|Warning)\b.*)$", re.M)
# Texts that each side words in its own way.
KIT_REASONS = {
    r"^Need at least (\d+) (?:CUDA|accelerator) devices?$": r"<multi-gpu-\1>",
    r"Previous test failed|poison_pill is set": "<poison_pill>",
}


class Recorder(unittest.TestResult):
    """Keeps what was reported of each test, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: dict[str, list[dict[str, Any]]] = {}

    def _add(self, test: Any, outcome: str, **more: Any) -> None:
        self.reports.setdefault(test.id(), []).append({"outcome": outcome, **more})

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self.reports.setdefault(test.id(), [])

    def addSuccess(self, test: Any) -> None:
        self._add(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._add(test, "skipped", reason=named_reason(reason))

    def addFailure(self, test: Any, err: Any) -> None:
        self._add(test, "failed", **described(err[1]))

    def addError(self, test: Any, err: Any) -> None:
        self._add(test, "error", **described(err[1]))

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self._add(test, "failed as expected")

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._add(test, "passed unexpectedly")

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            outcome = "failed" if issubclass(err[0], test.failureException) else "error"
            self._add(test, outcome, subtest=subtest._subDescription(), **described(err[1]))


def described(error: BaseException) -> dict[str, Any]:
    """The type of an exception with its bases, and its text."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind is not object]
    return {"types": kinds, "text": str(error), "says": sorted(set(EXCEPTION_LINE.findall(str(error))))}


def named_reason(reason: str) -> str:
    """The reason of a skip; a name for each of the kit's own texts, such as its key in TEST_SKIPS."""
    for pattern, name in KIT_REASONS.items():
        if found := re.search(pattern, reason):
            return found.expand(name)
    for module in ("torch.testing._internal.common_distributed", "torch_testing_ext._testing.marks.needs"):
        table = getattr(sys.modules.get(module), "TEST_SKIPS", {})
        for key, skip in table.items():
            if skip.message == reason:
                return f"<{key}>"
    return reason


def run_file(name: str, results: Path) -> None:
    """Run the tests of a module in this process, and write their outcomes."""
    began = time.perf_counter()
    notes = results / f"{name}.notes"
    os.environ["CONFORMANCE_NOTES"] = str(notes)
    recorder = Recorder()
    broken = None
    try:
        suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(name))
        suite.run(recorder)
    except BaseException as error:
        broken = f"{type(error).__name__}: {error}"
    noted: dict[str, dict[str, list[str]]] = {}
    for line in notes.read_text().splitlines() if notes.exists() else ():
        test, rank, text = json.loads(line)
        noted.setdefault(test, {}).setdefault(rank, []).append(text)
    tests = {
        test: {"reports": recorder.reports.get(test, []), "notes": noted.get(test, {})}
        for test in sorted({*recorder.reports, *noted})
    }
    document = {"broken": broken, "seconds": time.perf_counter() - began, "tests": tests}
    (results / f"{name}.json").write_text(json.dumps(document))


def fork_for(name: str, results: Path) -> int:
    """Start a child for a file. Its output goes to RESULTS/FILE.log."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(results / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.alarm(MOST_SECONDS)
        run_file(name, results)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class ForkedAsIfSpawned(multiprocessing.context.ForkServerProcess):
    """A process that is forked off the fork server, with the environment that a new interpreter would inherit."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class ForkServer(multiprocessing.context.ForkServerContext):
    """The start method that takes the place of spawn."""

    Process = ForkedAsIfSpawned  # type: ignore[assignment]


def replace_spawn() -> None:
    context = ForkServer()
    context.set_forkserver_preload(["torch.testing._internal.common_distributed"])
    multiprocessing.context._concrete_contexts["spawn"] = context  # type: ignore[attr-defined]


def main(side: str, folder: str, results: str, slots: str, *names: str) -> None:
    # Before anything is imported: the ranks, too, find the files and write no byte code beside them.
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    if side == "drop-in":
        from torch_testing_ext.upstream import drop_in

        drop_in.install()
    elif side == "pytorch":
        replace_spawn()
    import torch  # noqa: F401  # once for all files

    waiting, running = list(names), set[int]()
    while waiting or running:
        while waiting and len(running) < int(slots):
            running.add(fork_for(waiting.pop(0), Path(results)))
        ended, _ = os.wait()
        running.discard(ended)


def arguments_of(side: str, folder: Path, results: Path, slots: int, names: Sequence[str]) -> list[str]:
    """The arguments of an interpreter that runs these files."""
    return [__file__, side, str(folder), str(results), str(slots), *names]


if __name__ == "__main__":
    main(*sys.argv[1:])
