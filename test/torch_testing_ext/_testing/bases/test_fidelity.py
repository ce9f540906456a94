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
{imports}

class Subject(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_writes(self):
        if self.rank == 0:
            process_state.write(os.environ["STATE_FILE"])

if __name__ == "__main__":
    run_tests()
"""
# Patches that a kit might make while it prepares a rank.
PATCHES = """
import sys
import torch
from torch_testing_ext._torch.devices import first_accelerator_use
prepare = first_accelerator_use.stop_noting

def patched():
    prepare()
    torch.distributed.all_reduce = lambda *args, **kwargs: None
    torch.distributed.FileStore.get = lambda *args: b""
    torch.set_default_dtype(torch.float64)
    torch.backends.mkldnn.enabled = False
    sys.meta_path.append(object())
    os.environ["PATCHED"] = "1"
    torch.library.define("patched::op", "(Tensor x) -> Tensor")

first_accelerator_use.stop_noting = patched
"""
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


class TestFidelity(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "test" / "torch_testing_ext"), str(ROOT), *sys.path]),
            "STATE_FILE": str(self.folder / "rank"),
        }

    def of_new_process(self) -> dict[str, str]:
        """The state of a new process that has imported what the rank had."""
        script = ROOT / "test" / "torch_testing_ext" / "kit" / "process_state.py"
        done = run_python(script, self.folder / "new", self.folder / "rank", **self.environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads((self.folder / "new").read_text())

    def of_rank(self, *words: object, imports: str = "") -> dict[str, str]:
        """The state of a rank of the subject, which an interpreter with these arguments runs."""
        file = self.folder / "test_subject.py"
        file.write_text(SUBJECT.format(imports=imports))
        done = run_python(*words, file.name if words else file, **self.environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return json.loads((self.folder / "rank").read_text())

    def differences(self, rank: dict[str, str], new: dict[str, str]) -> Iterator[str]:
        for name in sorted(rank.keys() | new.keys()):
            if rank.get(name) != new.get(name) and not is_listed(name):
                yield f"{name}: {rank.get(name)} in a rank, {new.get(name)} in a new process"

    def test_a_rank_is_like_a_new_process(self):
        """But for what the page lists, and the page lists nothing that neither of them has."""
        rank = self.of_rank()
        new = self.of_new_process()
        self.assertGreater(len(new), 10_000)
        self.assertEqual([*self.differences(rank, new)], [])
        known = {*rank, *new, "variable TORCH_TESTING_EXT_SEED"}
        if torch.__version__ < (2, 15):
            known.add("torch.distributed.distributed_c10d.ProcessGroup.reconfigure")
        self.assertEqual([name for name in page() if not fnmatch.filter(known, name)], [])

    def test_a_rank_under_run_test(self):
        before = os.getcwd()
        os.chdir(self.folder)
        self.addCleanup(os.chdir, before)
        runner = ("-m", "torch_testing_ext", "--cache", self.folder / "cache", "-o", "tests=.")
        rank = self.of_rank(*runner)
        of_pytest = page("### Under pytest")
        found = [*self.differences(rank, self.of_new_process())]
        unknown = [line for line in found if not any(fnmatch.fnmatchcase(line, f"{name}: *") for name in of_pytest)]
        self.assertEqual(unknown, [])
        for name in of_pytest:
            with self.subTest(name):
                self.assertTrue(fnmatch.filter(found, f"{name}: *"))

    def test_patches_are_found(self):
        rank = self.of_rank(imports=PATCHES)
        found = {line.partition(": ")[0] for line in self.differences(rank, self.of_new_process())}
        self.assertEqual(PATCHED - found, set())


if __name__ == "__main__":
    run_tests()
