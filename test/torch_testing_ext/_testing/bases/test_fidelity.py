"""A rank is like a new process that has imported the same modules, but for what docs/contribute/fidelity.md lists."""

import fnmatch
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kit.processes import ROOT, run_python

from torch_testing_ext.common_utils import TestCase, run_tests

pytestmark = pytest.mark.slow

SUBJECT = """
import os
from kit import process_state
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests

class Subject(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_writes(self):
        if self.rank == 0:
            process_state.write(os.path.join(os.environ["STATES"], type(self).__name__))

{more}

if __name__ == "__main__":
    run_tests()
"""
# Patches that a kit might make while it prepares a rank.
PATCHED_SUBJECT = """
import sys
import torch
from torch_testing_ext import launch
from torch_testing_ext._torch.devices import first_accelerator_use

def patched(prepare=first_accelerator_use.stop_noting):
    prepare()
    torch.distributed.all_reduce = lambda *args, **kwargs: None
    torch.distributed.FileStore.get = lambda *args: b""
    torch.set_default_dtype(torch.float64)
    torch.backends.mkldnn.enabled = False
    sys.meta_path.append(object())
    os.environ["PATCHED"] = "1"
    torch.library.define("patched::op", "(Tensor x) -> Tensor")

class ZPatched(Subject):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        launch.close()  # a new server inherits the patch
        first_accelerator_use.stop_noting = patched"""
PATCHED = {
    *("torch.distributed.all_reduce", "torch.get_default_dtype()", "torch._C._get_mkldnn_enabled()", "sys.meta_path"),
    *("variable PATCHED", "operators"),
}


def page(title: str = "## Differences") -> list[str]:
    """The names in the first column of a table of differences, as patterns."""
    page = Path(ROOT, "docs", "contribute", "fidelity.md").read_text()
    text = page.partition(f"{title}\n")[2].partition("\n##")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def is_listed(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in page())


class States(TestCase):
    """States of a rank of the subject, and of a new process that has imported what the rank had."""

    words: tuple[object, ...] = ()
    more = ""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        (cls.folder / "test_subject.py").write_text(SUBJECT.format(more=cls.more))
        here = os.getcwd()
        os.chdir(cls.folder)
        try:
            cls.run_program(*cls.words, "test_subject.py")
            cls.run_program(ROOT / "test" / "torch_testing_ext" / "kit" / "process_state.py", "new", "Subject")
        finally:
            os.chdir(here)

    @classmethod
    def run_program(cls, *words: object) -> None:
        path = os.pathsep.join([str(ROOT / "test" / "torch_testing_ext"), str(ROOT), *sys.path])
        done = run_python(*words, PYTHONPATH=path, STATES=str(cls.folder))
        assert done.returncode == 0, done.stdout + done.stderr

    def state(self, name: str) -> dict[str, str]:
        return json.loads((self.folder / name).read_text())

    def differences(self, rank: dict[str, str], new: dict[str, str]) -> Iterator[str]:
        for name in sorted(rank.keys() | new.keys()):
            if rank.get(name) != new.get(name) and not is_listed(name):
                yield f"{name}: {rank.get(name)} in a rank, {new.get(name)} in a new process"


class TestFidelity(States):
    more = PATCHED_SUBJECT

    def test_a_rank_is_like_a_new_process(self):
        """But for what the page lists, and the page lists nothing that neither of them has."""
        rank, new = self.state("Subject"), self.state("new")
        self.assertGreater(len(new), 10_000)
        self.assertEqual([*self.differences(rank, new)], [])
        known = {*rank, *new, "variable TORCH_TESTING_EXT_SEED"}
        if torch.__version__ < (2, 15):
            known.add("torch.distributed.distributed_c10d.ProcessGroup.reconfigure")
        self.assertEqual([name for name in page() if not fnmatch.filter(known, name)], [])

    def test_patches_are_found(self):
        found = {line.partition(": ")[0] for line in self.differences(self.state("ZPatched"), self.state("new"))}
        self.assertEqual(PATCHED - found, set())


class TestUnderRunTest(States):
    words = ("-m", "torch_testing_ext", "--cache", "cache", "-o", "tests=.")

    def test_a_rank(self):
        of_pytest = page("### Under pytest")
        found = [*self.differences(self.state("Subject"), self.state("new"))]
        unknown = [line for line in found if not any(fnmatch.fnmatchcase(line, f"{name}: *") for name in of_pytest)]
        self.assertEqual(unknown, [])
        for name in of_pytest:
            with self.subTest(name):
                self.assertTrue(fnmatch.filter(found, f"{name}: *"))


if __name__ == "__main__":
    run_tests()
