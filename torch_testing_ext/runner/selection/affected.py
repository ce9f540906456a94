"""Selects the tests that changes may affect, by a record of the files that each has read. In doubt, it selects a test.

The record also has the tests of each file, so that `--list` needs no import. It is kept beside the durations. It has
hashes of contents, so that a file counts as changed if it is not as the test has read it, whatever git says; and git
names the files that differ from a commit, although tests have run since.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from torch_testing_ext._process import file_reads, messages
from torch_testing_ext._process.words import grouped

from ..model import Test, TestId
from ..options.options import Options, UsageError
from ..options.test_folders import SETTINGS_FILES
from ..scheduling.earlier_runs import EarlierRuns, Remembered

GIT_TIMEOUT = 20.0
_SHARED = ""  # the entry for what the import of a file reads
_FIELDS = ({"key", "files", "tests"}, {"of", "files"})
_NO_RECORD = "there is no record of what it reads"
# Variables that differ from one terminal to the next, and say nothing to a test.
_OF_TERMINAL = {
    *("PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "TERM", "COLORTERM", "TERM_SESSION_ID", "WINDOWID", "TTY"),
    *("TMUX", "TMUX_PANE", "STY", "DISPLAY", "WAYLAND_DISPLAY", "INVOCATION_ID", "JOURNAL_STREAM", "NO_COLOR"),
}
_PREFIXES_OF_TERMINAL = ("SSH_", "XDG_", "DBUS_", "VSCODE_", "LESS", "TORCH_TESTING_EXT_RUN_")


class Affected:
    """The records of what tests have read, and what has changed since."""

    def __init__(self, options: Options, root: Path, earlier: EarlierRuns):
        self._options, self._root, self._earlier = options, str(root), earlier
        self._key = key_of_run(options, root)
        self._now = cache(lambda path: file_reads.hash_of(os.path.join(root, path)))
        self._real = cache(lambda path: os.path.realpath(os.path.join(root, path)))
        self._of: dict[str, dict[str, Any]] = {}  # the records of each file of tests
        self._reasons: dict[str, str | None] = {}  # for files of tests
        self._digests: dict[str, str] = {}  # of what the import of each file of tests reads

    # -- selection

    def file_is(self, file: str) -> bool:
        """Whether a file of tests has any that are affected, or may have."""
        tests = self.known_tests(file)
        return tests is None or self._of_import(file) is not None or any(self.why(test.id) for test in tests)

    def why(self, test: TestId) -> str | None:
        """The reason to select a test; None if nothing that it has read has changed."""
        if self._earlier.last_failed.failed(test):
            return "its last run failed"
        if (why := self._of_import(test.file)) is not None:
            return why
        record = self._record(test.file)
        if (own := record.get(_name(test))) is None:
            return _NO_RECORD
        if test.file not in self._digests:
            self._digests[test.file] = _digest(record[_SHARED])
        if own["of"] != self._digests[test.file]:
            return "its file imports something else than when it ran, or in another environment"
        return self._reason(own["files"])

    def explain(self, file: str, wanted: Iterable[Test]) -> Iterator[str]:
        """Say of tests why they are selected, or not."""
        record = self._record(file)
        for test in wanted:
            read = {*record.get(_SHARED, {"files": ()})["files"], *record.get(_name(test.id), {"files": ()})["files"]}
            nothing = f"not selected: none of the {len(read)} files and folders that it has read has changed"
            why = self.why(test.id)
            yield f"{test.id}: {nothing if why is None else f'selected: {why}'}"

    def known_tests(self, file: str) -> tuple[Test, ...] | None:
        """The tests of a file, as its last import has found them; None if that has not found all, or elsewhere."""
        shared = self._record(file).get(_SHARED)
        if shared is None or shared["tests"] is None or shared["key"] != self._key:
            return None
        return tuple(messages.decode(Test, test) for test in shared["tests"])

    def unchanged_tests(self, files: Iterable[str]) -> tuple[Test, ...] | None:
        """The tests of these files; None unless an import of each would find the same, and all of them can run."""
        found: list[Test] = []
        for file in files:
            tests = self.known_tests(file)
            if tests is None or self._change(self._record(file)[_SHARED]["files"]):
                return None
            found += tests
        return None if any(test.marks is None for test in found) else tuple(found)

    def paths(self, files: Iterable[str]) -> set[str]:
        """Everything that these files and their tests have read."""
        found = {path for file in files for entry in self._record(file).values() for path in entry["files"]}
        return {os.path.join(self._root, path) for path in {*found, *files} if not path.startswith(file_reads.PROGRAM)}

    def _of_import(self, file: str) -> str | None:
        if file not in self._reasons:
            shared = self._record(file).get(_SHARED)
            if shared is None:
                self._reasons[file] = _NO_RECORD
            elif shared["key"] != self._key:
                self._reasons[file] = "the environment, the options, Python or torch have changed"
            else:
                self._reasons[file] = self._reason(shared["files"])
        return self._reasons[file]

    def _reason(self, files: Mapping[str, str]) -> str | None:
        if self._by_git is None:
            return "git does not say what has changed"
        if (change := self._change(files)) is not None:
            return change
        for path in files if self._by_git else ():
            if self._real(path) in self._by_git:
                return f"{path} differs from {self._options.since or 'the last commit'}"
        return None

    def _change(self, files: Mapping[str, str]) -> str | None:
        for path, before in files.items():
            if path.startswith(file_reads.PROGRAM):
                return f"it starts {path[1:]}, whose reads are not recorded"
            if self._now(path) != before:
                return f"{path} has changed since its last run"
        return None

    # -- git

    @cached_property
    def _by_git(self) -> frozenset[str] | None:
        """The files that differ from a commit, in the working tree; None if git does not say."""
        if self._options.watch:
            return frozenset()
        since = self._options.since
        try:
            top = self._git("rev-parse", "--show-toplevel").removesuffix("\n")
            if since is not None:
                self._check(since)
            base = ["HEAD"] if since is None else [self._git("merge-base", since, "HEAD").strip()]
            names = self._git("-C", top, "diff", "--name-only", "--no-renames", "-z", *base)
            names += self._git("-C", top, "ls-files", "--others", "--exclude-standard", "-z")
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", "") or error).strip().splitlines()
            why = said[0] if said else "it has failed"
            self._earlier.warnings.append(f"every test is selected, since git does not say what has changed: {why}")
            return None
        return frozenset(os.path.realpath(os.path.join(top, name)) for name in names.split("\0") if name)

    def _check(self, revision: str) -> None:
        try:
            self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        except subprocess.CalledProcessError:
            raise UsageError(f"--since {revision}: git knows no such commit") from None

    def _git(self, *words: str) -> str:
        command = ["git", "-C", self._root, *words]
        environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, check=True, env=environ, timeout=GIT_TIMEOUT)
        return os.fsdecode(done.stdout)

    # -- the records

    def _place(self, file: str) -> Remembered:
        name = hashlib.blake2b(file.encode(errors="surrogateescape"), digest_size=12).hexdigest()
        is_valid = lambda one: isinstance(one, dict) and one.keys() in _FIELDS and isinstance(one["files"], dict)  # noqa: E731
        return Remembered(self._options.cache, f"reads/{name}", is_valid, self._earlier.warnings.append)

    def _record(self, file: str) -> dict[str, Any]:
        if file not in self._of:
            self._of[file] = self._place(file).load()
        return self._of[file]

    def record(
        self, reads: Mapping[TestId, dict[str, str] | None], known: Iterable[Test], finished: Iterable[TestId] = ()
    ) -> None:
        """Keep what files of tests, and tests that have finished, have read. `known`: all tests of these files."""
        tests = grouped((test.id.file, test) for test in known)
        ran = grouped((test.file, test) for test in finished if test.method)
        for file in [test.file for test in reads if not test.method]:
            self._record_file(file, reads, tests.get(file, ()), ran.get(file, ()))

    def _record_file(
        self, file: str, reads: Mapping[TestId, dict[str, str] | None], tests: Sequence[Test], ran: Sequence[TestId]
    ) -> None:
        imported = reads[TestId(file)]
        if imported is not None:
            settings = {os.path.join(self._root, name) for name in settings_files([file])} - imported.keys()
            imported = self._kept({**{path: file_reads.hash_of(path) for path in settings}, **imported})
        whole = all(test.id.method for test in tests)  # else it is broken, or skips all of its tests
        listed = [messages.encode(test) for test in tests] if whole else None
        shared = {"key": self._key, "files": imported, "tests": listed}
        if not ran and json.dumps(shared) == json.dumps(self._record(file).get(_SHARED)):
            return

        def change(values: dict[str, Any]) -> None:
            if imported is None:
                values.clear()
                return
            values[_SHARED], digest = shared, _digest(shared)
            for test in ran:
                if (own := reads.get(test)) is None:
                    values.pop(_name(test), None)
                else:
                    values[_name(test)] = {"of": digest, "files": self._kept(own)}
            for name in values.keys() - {_SHARED, *(_name(test.id) for test in tests)}:
                del values[name]

        self._place(file).update(change)
        self._of.pop(file, None)
        self._digests.pop(file, None)

    def _kept(self, files: Mapping[str, str]) -> dict[str, str]:
        """The files by their paths from the root, without temporary ones."""
        inside, temporary = f"{self._root}{os.sep}", tempfile.gettempdir()

        def stays(path: str) -> bool:
            bare = path.rstrip("*?")
            if not f"{bare}{os.sep}".startswith(f"{temporary}{os.sep}"):
                return True
            if temporary.startswith(inside):
                return False
            return path.startswith(inside) or (bare != temporary and os.path.lexists(bare))

        return {path.removeprefix(inside): found for path, found in sorted(files.items()) if stays(path)}


def _name(test: TestId) -> str:
    return str(test)[len(test.file) :].removeprefix("::")


def _digest(shared: Mapping[str, Any]) -> str:
    """Tells imports of a file apart: in other environments, or of other contents."""
    text = json.dumps([shared["key"], shared["files"]], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def settings_files(files: Iterable[str]) -> set[str]:
    """The files that pytest reads by itself, also those that do not exist."""
    folders = {str(folder) for file in files for folder in Path(file).parents}
    return {*SETTINGS_FILES, *(os.path.normpath(f"{folder}/conftest.py") for folder in folders)}


def key_of_run(options: Options, root: Path) -> str:
    """A hash of all else that decides which tests are found, and what they need."""
    machine = [options.gpus, options.fake_gpus, options.ranks_per_gpu, options.jobs, bool(options.marks)]
    packages: list[object] = [_time_of_package(name) for name in ("torch", __package__.partition(".")[0])]
    # Their times change when any package comes, goes or is replaced.
    folders = [entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")]
    packages += [(entry, os.stat(entry).st_mtime_ns) for entry in folders if os.path.isdir(entry)]
    facts = [sys.version, str(root), machine, packages, [str(place) for place in options.drop_in]]
    environ = sorted(
        item
        for item in os.environ.items()
        if item[0] not in _OF_TERMINAL and not item[0].startswith(_PREFIXES_OF_TERMINAL)
    )
    text = json.dumps([*facts, environ], default=str)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def _time_of_package(name: str) -> tuple[str, int]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return "", 0
    return spec.origin, max(file.stat().st_mtime_ns for file in (Path(spec.origin), Path(spec.origin).parent))
