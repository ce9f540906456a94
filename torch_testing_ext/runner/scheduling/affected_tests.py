"""The choice of the tests that changes may affect, by a record of the files that each has read.

The record also has the tests of each file, so that `--list` needs no import. It is kept beside the durations. It
has hashes of contents, so that a file counts as changed if it is not as the test has read it, whatever git says;
and git names the files that differ from a commit, although tests have run since.
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
from functools import cached_property
from pathlib import Path
from typing import Any

from torch_testing_ext._machine import fake_accelerator
from torch_testing_ext._machine.device_locks import LEASE_FOLDER
from torch_testing_ext._process import file_reads, messages
from torch_testing_ext._process.project_folder import SETTINGS_FILES
from torch_testing_ext._process.terminal_variables import is_of_terminal
from torch_testing_ext._process.words import grouped
from torch_testing_ext.launch.aspects.fake_accelerators import ACCELERATORS
from torch_testing_ext.runner.load_as import FILES, LoadAs
from torch_testing_ext.runner.model import Test, TestId
from torch_testing_ext.runner.options import Options, UsageError

from .earlier_runs import EarlierRuns, Remembered

# The files that an import or a test has read, with the hashes of their contents.
Files = dict[str, str]
# The files that were read, by test or by file of tests; None where they are unknown.
ReadsOfTests = Mapping[TestId, Files | None]
CHANGES_TIMEOUT = 20.0
# The entry for what the import of a file reads.
_SHARED_READS = ""
# The file of the record of what files there are.
_ALL_FILES = FILES
_FIELDS = ({"key", "files", "tests"}, {"of", "files"})
_NO_RECORD = "there is no record of what it reads"
# Variables of each run.
_OF_RUNS = (fake_accelerator.MEMORY_FILE, LEASE_FOLDER)
_PREFIX_OF_RUNS = "TORCH_TESTING_EXT_RUN_"


class Affected:
    """The records of what tests have read, and what has changed since."""

    def __init__(self, options: Options, root: Path, earlier: EarlierRuns):
        self._options = options
        self._root = str(root)
        self._earlier = earlier
        self._key = key_of_run(options, root)
        self._hashes: dict[str, str] = {}
        self._real_paths: dict[str, str] = {}
        # The records of each file of tests.
        self._records: dict[str, dict[str, Any]] = {}
        # The reasons to select files of tests.
        self._reasons: dict[str, str | None] = {}
        # The digests of what the import of each file of tests reads.
        self._digests: dict[str, str] = {}

    def _hash_now(self, path: str) -> str:
        if path not in self._hashes:
            absolute = os.path.join(self._root, path)
            self._hashes[path] = file_reads.hash_of(absolute)
        return self._hashes[path]

    def _real_path(self, path: str) -> str:
        if path not in self._real_paths:
            absolute = os.path.join(self._root, path)
            self._real_paths[path] = os.path.realpath(absolute)
        return self._real_paths[path]

    # -- selection

    def file_is(self, file: str) -> bool:
        """Whether a file of tests has any that are affected, or may have."""
        tests = self.known_tests(file)
        if tests is None or self._why_import(file) is not None:
            return True
        return any(self.why(test.id) for test in tests)

    def why(self, test: TestId) -> str | None:
        """The reason to select a test; None if nothing that it has read has changed."""
        if self._earlier.last_failed.failed(test):
            return "its last run failed"
        why_import = self._why_import(test.file)
        if why_import is not None:
            return why_import
        record = self._record(test.file)
        reads = record.get(_name(test))
        if reads is None:
            return _NO_RECORD
        if test.file not in self._digests:
            self._digests[test.file] = _digest(record[_SHARED_READS])
        if reads["of"] != self._digests[test.file]:
            return "its file imports other modules than in its last run, or in another environment"
        return self._why_files(reads["files"])

    def explain(self, file: str, wanted: Iterable[Test]) -> Iterator[str]:
        """Say of tests why they are selected, or not."""
        record = self._record(file)
        for test in wanted:
            why = self.why(test.id)
            if why is not None:
                yield f"{test.id}: selected: {why}"
                continue
            paths: set[str] = set()
            for name in (_SHARED_READS, _name(test.id)):
                if name in record:
                    paths.update(record[name]["files"])
            yield f"{test.id}: not selected: none of the {len(paths)} files and folders that it has read has changed"

    def known_tests(self, file: str) -> tuple[Test, ...] | None:
        """The tests of a file, as its last import has found them; None if that has not found all, or elsewhere."""
        shared = self._record(file).get(_SHARED_READS)
        if shared is None or shared["key"] != self._key:
            return None
        tests = shared["tests"]
        if tests is None:
            return None
        return tuple(messages.decode(Test, test) for test in tests)

    def unchanged_tests(self, files: Iterable[str]) -> tuple[Test, ...] | None:
        """The tests of these files; None unless an import of each would find the same, and all of them can run."""
        all_tests: list[Test] = []
        for file in files:
            tests = self.known_tests(file)
            if tests is None:
                return None
            shared = self._record(file)[_SHARED_READS]
            if self._change(shared["files"]):
                return None
            all_tests += tests
        if any(test.marks is None for test in all_tests):
            return None
        return tuple(all_tests)

    def unchanged_files(self, load_as: LoadAs) -> tuple[str, ...] | None:
        """The files that pytest collects; None unless it would find the same again."""
        found = self._record(_ALL_FILES).get(_SHARED_READS)
        if found is None or found["key"] != self._key_of_files(load_as) or self._change(found["files"]):
            return None
        return tuple(found["tests"])

    def record_files(self, load_as: LoadAs, reads: ReadsOfTests, files: Sequence[str], is_whole: bool) -> None:
        """Keep which files pytest collects."""
        read = reads.get(TestId(_ALL_FILES))
        if read is None or not is_whole:
            self._place(_ALL_FILES).update(lambda values: values.clear())
            return
        found = {
            "key": self._key_of_files(load_as),
            "files": self._relative_paths(self._with_settings(_ALL_FILES, read)),
            "tests": list(files),
        }
        self._place(_ALL_FILES).update(lambda values: values.update({_SHARED_READS: found}))
        self._records.pop(_ALL_FILES, None)

    def _key_of_files(self, load_as: LoadAs) -> str:
        return f"{self._key} {json.dumps(messages.encode(load_as))}"

    def paths(self, files: Iterable[str]) -> dict[str, set[str]]:
        """Everything that these files and their tests have read, with the hashes of its contents then."""
        paths: dict[str, set[str]] = {}
        for file in files:
            paths.setdefault(os.path.join(self._root, file), set())
            for reads in self._record(file).values():
                for name, contents in reads["files"].items():
                    if not name.startswith(file_reads.PROGRAM):
                        paths.setdefault(os.path.join(self._root, name), set()).add(contents)
        return paths

    def _why_import(self, file: str) -> str | None:
        """The reason to select all tests of a file: its import may give something else than when they ran."""
        if file not in self._reasons:
            shared = self._record(file).get(_SHARED_READS)
            if shared is None:
                self._reasons[file] = _NO_RECORD
            elif shared["key"] != self._key:
                self._reasons[file] = "the environment, the options, Python or torch have changed"
            else:
                self._reasons[file] = self._why_files(shared["files"])
        return self._reasons[file]

    def _why_files(self, files: Mapping[str, str]) -> str | None:
        if self._by_git is None:
            return "git cannot say what has changed"
        change = self._change(files)
        if change is not None or not self._by_git:
            return change
        for path in files:
            if self._real_path(path) in self._by_git:
                return f"{path} differs from {self._named_base()}"
        return None

    def _change(self, files: Mapping[str, str]) -> str | None:
        for path, before in files.items():
            if path.startswith(file_reads.PROGRAM):
                return f"it starts {path[1:]}, whose reads are not recorded"
            if self._hash_now(path) != before:
                return f"{path} has changed since its last run"
        return None

    # -- git

    @cached_property
    def _by_git(self) -> frozenset[str] | None:
        """The files that differ from a commit, in the working tree; None if git does not say."""
        if self._options.watch:
            return frozenset()
        try:
            names = self._names_by_git()
        except (OSError, subprocess.SubprocessError) as error:
            message = os.fsdecode(getattr(error, "stderr", None) or str(error))
            lines = message.strip().splitlines()
            why = lines[0] if lines else "it has failed"
            self._earlier.warnings.append(f"every test is selected, since git cannot say what has changed: {why}")
            return None
        return frozenset(os.path.realpath(name) for name in names)

    def _names_by_git(self) -> list[str]:
        """The files of the working tree that differ from the commit, or are new."""
        top = self._git("rev-parse", "--show-toplevel").removesuffix("\n")
        base = self._options.affected or "HEAD"
        if base != "HEAD":
            self._check(base)
            base = self._git("merge-base", base, "HEAD").strip()
        changed = self._git("-C", top, "diff", "--name-only", "--no-renames", "-z", base)
        new = self._git("-C", top, "ls-files", "--others", "--exclude-standard", "-z")
        names = []
        for name in (*changed.split("\0"), *new.split("\0")):
            if name:
                names.append(os.path.join(top, name))
        return names

    def _named_base(self) -> str:
        base = self._options.affected
        return "the last commit" if base in (None, "HEAD") else str(base)

    def _check(self, revision: str) -> None:
        try:
            self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        except subprocess.CalledProcessError:
            raise UsageError(f"--affected={revision}: git knows no such commit") from None

    def _git(self, *words: str) -> str:
        command = ["git", "-C", self._root, *words]
        environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, check=True, env=environ, timeout=CHANGES_TIMEOUT)
        return os.fsdecode(done.stdout)

    # -- the records

    def _place(self, file: str) -> Remembered:
        digest = hashlib.blake2b(file.encode(errors="surrogateescape"), digest_size=12)
        name = f"reads/{digest.hexdigest()}"
        return Remembered(self._options.cache, name, _is_record, self._earlier.warnings.append)

    def _record(self, file: str) -> dict[str, Any]:
        if file not in self._records:
            self._records[file] = self._place(file).load()
        return self._records[file]

    def record(
        self,
        reads: ReadsOfTests,
        known: Iterable[Test],
        finished: Iterable[TestId] = (),
    ) -> None:
        """Keep what files of tests, and tests that have finished, have read. `known`: all tests of these files."""
        tests = grouped((test.id.file, test) for test in known)
        ran = grouped((test.file, test) for test in finished if test.method)
        for test in reads:
            if not test.method and test.file != _ALL_FILES:
                file = test.file
                self._record_file(file, reads, tests.get(file, ()), ran.get(file, ()))

    def _record_file(
        self,
        file: str,
        reads: ReadsOfTests,
        tests: Sequence[Test],
        ran: Sequence[TestId],
    ) -> None:
        """Update the record of a file, of which these tests have run; all of it is dropped if its import failed."""
        files_of_import = reads[TestId(file)]
        if files_of_import is not None:
            files_of_import = self._relative_paths(self._with_settings(file, files_of_import))
        # A file that is not whole is broken, or skips all of its tests.
        is_whole = all(test.id.method for test in tests)
        shared = {
            "key": self._key,
            "files": files_of_import,
            "tests": [messages.encode(test) for test in tests] if is_whole else None,
        }
        if not ran:
            before = self._record(file).get(_SHARED_READS)
            if json.dumps(shared) == json.dumps(before):
                return
        entries = self._entries(reads, ran, _digest(shared))
        existing = {_name(test.id) for test in tests}

        def change(values: dict[str, Any]) -> None:
            if files_of_import is None:
                values.clear()
                return
            for name in list(values):
                if name not in existing or name in entries:
                    del values[name]
            for name, entry in entries.items():
                if name in existing and entry is not None:
                    values[name] = entry
            values[_SHARED_READS] = shared

        self._place(file).update(change)
        self._records.pop(file, None)
        self._digests.pop(file, None)

    def _entries(self, reads: ReadsOfTests, ran: Iterable[TestId], digest: str) -> dict[str, dict[str, Any] | None]:
        """The entries of tests that have run, by their names; None if it is unknown what they have read."""
        entries: dict[str, dict[str, Any] | None] = {}
        for test in ran:
            files = reads.get(test)
            entry = None
            if files is not None:
                entry = {"of": digest, "files": self._relative_paths(files)}
            entries[_name(test)] = entry
        return entries

    def _with_settings(self, file: str, files: Files) -> Files:
        """The files that an import has read, after those that pytest reads before it."""
        all_files = {}
        for name in settings_files([file]):
            path = os.path.join(self._root, name)
            if path not in files:
                all_files[path] = file_reads.hash_of(path)
        all_files.update(files)
        return all_files

    def _relative_paths(self, files: Files) -> Files:
        """The files by their paths from the root, without temporary ones."""
        inside = f"{self._root}{os.sep}"
        temporary = tempfile.gettempdir()

        def stays(path: str) -> bool:
            bare = path.rstrip("*?")
            is_temporary = f"{bare}{os.sep}".startswith(f"{temporary}{os.sep}")
            if not is_temporary:
                return True
            if temporary.startswith(inside):
                return False
            if path.startswith(inside):
                return True
            return bare != temporary and os.path.lexists(bare)

        relative = {}
        for path, content in sorted(files.items()):
            if stays(path):
                relative[path.removeprefix(inside)] = content
        return relative


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() not in _FIELDS:
        return False
    return isinstance(value["files"], dict)


def _name(test: TestId) -> str:
    return str(test)[len(test.file) :].removeprefix("::")


def _digest(shared: Mapping[str, Any]) -> str:
    """Tells imports of a file apart: in other environments, or of other contents."""
    text = json.dumps([shared["key"], shared["files"]], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def settings_files(files: Iterable[str]) -> set[str]:
    """The files that pytest reads by itself, also those that do not exist."""
    names = set(SETTINGS_FILES)
    for file in files:
        for folder in Path(file).parents:
            names.add(os.path.normpath(f"{folder}/conftest.py"))
    return names


def key_of_run(options: Options, root: Path) -> str:
    """A hash of all else that decides which tests are found, and what they need."""
    machine = [
        options.gpus,
        options.value(ACCELERATORS),
        options.ranks_per_gpu,
        options.jobs,
        bool(options.marks),
        options.by_pytest,
    ]
    own_package = __package__.partition(".")[0]
    packages: list[object] = [_time_of_package("torch"), _time_of_package(own_package)]
    # Their times change when any package comes, goes or is replaced.
    for folder in sys.path:
        is_of_packages = os.path.basename(folder) in ("site-packages", "dist-packages")
        if is_of_packages and os.path.isdir(folder):
            packages.append((folder, os.stat(folder).st_mtime_ns))
    drop_in = [str(place) for place in options.drop_in]
    environ = []
    for name, value in sorted(os.environ.items()):
        if not is_of_terminal(name) and name not in _OF_RUNS and not name.startswith(_PREFIX_OF_RUNS):
            environ.append((name, value))
    facts = [sys.version, str(root), machine, packages, drop_in, environ]
    text = json.dumps(facts, default=str)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def _time_of_package(name: str) -> tuple[str, int]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return "", 0
    file = Path(spec.origin)
    return spec.origin, max(file.stat().st_mtime_ns, file.parent.stat().st_mtime_ns)
