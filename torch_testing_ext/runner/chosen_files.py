"""The files that the user chose, by names and by what pytest has."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from torch_testing_ext.runner.load_as import FilesFound
from torch_testing_ext.runner.scheduling.affected_tests import Affected
from torch_testing_ext.runner.scheduling.finding_files import NOWHERE, all_files, relative_to, test_files
from torch_testing_ext.runner.scheduling.selection import Selection

from .options import Options, UsageError


@dataclass(frozen=True)
class Chosen:
    """The files that the user chose by names, and the selection of their tests."""

    selection: Selection
    files: tuple[str, ...]
    known_files: Sequence[str]
    root: Path
    # The files to import if the tests that failed no longer exist.
    more_files: tuple[str, ...] = ()
    # The records by which --affected decides, too.
    affected: Affected | None = None

    @classmethod
    def of(cls, options: Options, root: Path, cwd: Path) -> Chosen:
        """The choice by the names of files alone, before pytest has said which it has. Raises UsageError."""
        selection = Selection.of(options, root, cwd)
        program = os.path.realpath(sys.argv[0])
        known = tuple(file for file in test_files(options, root, cwd) if os.path.realpath(root / file) != program)
        if not options.by_pytest:
            if not known and not options.names:
                raise UsageError(NOWHERE.format(root=root))
            return cls(selection, selection.files(known), known, root)
        try:
            return cls(selection, selection.files(known), known, root)
        except UsageError:
            everything = tuple(all_files(root))
            with suppress(UsageError):
                selection.files(everything)
                return cls(selection, (), known, root)
            raise

    def may_be_in(self, folder: str) -> bool:
        """Whether chosen files may be in a folder, by their names alone."""
        return not self.selection.included or any(PurePath(file).is_relative_to(folder) for file in self.files)

    def among(self, files: FilesFound) -> Chosen:
        """The choice among the files that pytest has. Raises UsageError."""
        # The program itself has a name like one: run_test.py.
        program = os.path.realpath(sys.argv[0])
        paths = [self.root / path for path in files.paths if os.path.realpath(self.root / path) != program]
        known = tuple(sorted({relative_to(self.root, path) for path in paths}))
        if files.failure:
            known = tuple(self.known_files)
        if not known and not files.failures:
            raise UsageError(files.failure or NOWHERE.format(root=self.root))
        return dataclasses.replace(self, files=self.selection.files(known), known_files=known)
