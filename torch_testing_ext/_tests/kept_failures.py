"""Reports of failures in files, where tests without a runner keep them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._process import words
from torch_testing_ext._process.files import write_atomically

CACHE = ".torch_testing_ext"
_FOLDER = "failures"
_MOST_KEPT = 100  # the newest
# pytest-xdist gives all workers of a run the same value.
_RUN_OF_XDIST = "PYTEST_XDIST_TESTRUNUID"


@dataclass(frozen=True)
class KeptReport:
    """The account of a test's latest failure, and the run in which it failed."""

    test: str
    # Its processes alone have this value.
    run: str
    account: str
    at: float


def keep_report(test: str, account: str) -> None:
    """Keep the account of a test's failure, in place of an earlier one. It may fail: the test does not fail by that."""
    safe = words.file_name(test)[-100:]
    folder = Path(CACHE, _FOLDER)
    with suppress(OSError):
        make_cache_folder(folder.parent)
        name = f"{safe}.{hashlib.sha1(test.encode(errors='replace')).hexdigest()[:8]}.txt"
        write_atomically(folder / name, f"{test}\n{_this_run()}\n\n{account}\n")
        for old in sorted(folder.glob("*.txt"), key=_age, reverse=True)[_MOST_KEPT:]:
            old.unlink(missing_ok=True)


def _this_run() -> str:
    return os.environ.get(_RUN_OF_XDIST) or str(os.getpid())


def make_cache_folder(folder: Path) -> None:
    """Creates the folder with a .gitignore that hides it from git."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")


def kept_reports(cache: Path) -> Iterator[KeptReport]:
    """The reports that are kept, the newest first."""
    for file in sorted(cache.glob(f"{_FOLDER}/*.txt"), key=_age, reverse=True):
        with suppress(OSError):
            head, _, account = file.read_text(encoding="utf-8", errors="replace").partition("\n\n")
            test, _, run = head.partition("\n")
            yield KeptReport(test, run, account.rstrip("\n"), _age(file))


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
