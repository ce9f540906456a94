"""Folders and sources of tests."""

import tempfile
import textwrap
import unittest
from pathlib import Path


def write(directory: Path, name: str, source: str) -> Path:
    """Write a source without its common indentation, with the folders that its name needs."""
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(source), encoding="utf-8")
    return file


def subject(test: str, name: str) -> str:
    """The source of a test's subject, `subjects/NAME` beside the file of the test, which gives its `__file__`."""
    return Path(test).with_name("subjects").joinpath(name).read_text(encoding="utf-8")


class FolderCase(unittest.TestCase):
    """A test case with an empty folder, `self.root`."""

    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory(prefix="torch_testing_ext_test_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()

    def write(self, name: str, source: str = "") -> Path:
        return write(self.root, name, source)
