"""The preloaded server imports what the files of the run use, and no more."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.processes.preloaded_client import WarmUp, warm_up_for

PLAIN = """
import unittest
from torch_testing_ext.common_distributed import MultiProcessTestCase
class T(MultiProcessTestCase):
    def test_plain(self): ...
"""
FSDP = "from torch_testing_ext.common_fsdp import FSDPTest\n"
DTENSOR = "from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase\n"
DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
LOADED = """
import os, sys, unittest
class T(unittest.TestCase):
    def test_it(self):
        with open(os.environ["LOADED"], "w") as file:
            file.write(" ".join(name for name in os.environ["NAMES"].split() if name in sys.modules))
"""


class WarmUpTest(TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()

    def files(self, *sources):
        names = [f"test_{number}.py" for number in range(len(sources))]
        for name, source in zip(names, sources, strict=True):
            (self.root / name).write_text(source)
        return names

    def imported(self, *sources):
        """The last words of the modules' names, without those that are always imported."""
        always = warm_up_for(self.root, ()).modules
        modules = warm_up_for(self.root, self.files(*sources)).modules
        self.assertEqual(modules[: len(always)], always)
        return [name.rpartition(".")[2] for name in modules[len(always) :]]

    def test_what_no_file_uses_is_not_imported(self):
        self.assertEqual(self.imported(PLAIN, PLAIN), [])
        self.assertEqual(self.imported(), [])

    def test_fsdp_and_dtensor_if_one_file_uses_them(self):
        self.assertEqual(self.imported(PLAIN, PLAIN, FSDP), ["common_fsdp"])
        self.assertEqual(self.imported(DTENSOR, PLAIN, PLAIN), ["common_dtensor"])
        self.assertEqual(self.imported("from torch.distributed import fsdp", PLAIN), ["common_fsdp"])
        self.assertEqual(self.imported("import torch.distributed.tensor", PLAIN, PLAIN), ["common_dtensor"])

    def test_names_of_pytorchs_own_kit(self):
        dtensor = "from torch.testing._internal.distributed._tensor.common_dtensor import with_comms"
        self.assertEqual(self.imported(dtensor), ["common_dtensor"])
        self.assertEqual(self.imported("from torch.testing._internal.common_fsdp import FSDPTest"), ["common_fsdp"])

    def test_dynamo_if_half_of_the_files_use_it(self):
        self.assertEqual(self.imported(DDP, PLAIN), ["dynamo_imported"])
        self.assertEqual(self.imported(DDP, PLAIN, PLAIN), [])

    def test_memory_is_collapsed_for_many_tests(self):
        many = "".join(f"    def test_{number}(self): ...\n" for number in range(7))
        self.assertFalse(warm_up_for(self.root, self.files(*[PLAIN] * 7)).collapse)
        self.assertTrue(warm_up_for(self.root, self.files(PLAIN + "instantiate_parametrized_tests(T)\n")).collapse)
        self.assertTrue(warm_up_for(self.root, self.files(PLAIN + many)).collapse)
        self.assertTrue(warm_up_for(self.root, self.files(*[PLAIN] * 8)).collapse)

    def test_files_that_cannot_be_read(self):
        (self.root / "test_bytes.py").write_bytes(b"\xff\xfe fsdp")
        self.assertEqual(warm_up_for(self.root, ["test_bytes.py"]).modules[-1].rpartition(".")[2], "common_fsdp")
        self.assertEqual(warm_up_for(self.root, ["no_such.py"]), WarmUp(warm_up_for(self.root, ()).modules, False))

    def loaded(self, source):
        """Which parts of torch a test finds imported, when run_test.py runs its file alone."""
        (name,) = self.files(LOADED + source)
        names = "torch.distributed.tensor torch._dynamo"  # not in the file, or it would use them
        environment = {**os.environ, "LOADED": str(self.root / "loaded"), "NAMES": names}
        command = ["-m", "torch_testing_ext", "--cache", str(self.root / "cache"), "--drop-in", name]
        done = subprocess.run(
            [sys.executable, *command], cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return (self.root / "loaded").read_text().split()

    @pytest.mark.slow
    def test_what_a_test_finds(self):
        self.assertEqual(self.loaded(""), [])
        self.assertEqual(self.loaded("# DTensor"), ["torch.distributed.tensor", "torch._dynamo"])


if __name__ == "__main__":
    run_tests()
