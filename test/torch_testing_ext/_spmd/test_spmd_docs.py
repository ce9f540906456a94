"""The examples in docs/compiler/overview.md and docs/compiler/port.md run as the pages describe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

ROOT = Path(__file__).resolve().parents[3]
PORTING = (ROOT / "docs" / "compiler" / "port.md").read_text()
EXAMPLE = re.compile(r"```python\n# (common|before|after)\n(.*?)```", re.DOTALL)
SECTIONS = {}
for _section in PORTING.split("\n## ")[1:]:
    SECTIONS[_section.partition("\n")[0]] = dict(EXAMPLE.findall(_section))
PAIRS = [title for title, pair in SECTIONS.items() if "before" in pair]


@pytest.mark.slow
class TestSPMDDocs(TestCase):
    """The example of the page under torchrun."""

    def test_example_under_torchrun(self):
        page = (ROOT / "docs" / "compiler" / "overview.md").read_text()
        example = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "train.py")
            script.write_text(example)
            ran = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
                # torchrun leaves its logs in the temporary folder.
                env={
                    **os.environ,
                    "TMPDIR": folder,
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                },
                cwd=folder,
                capture_output=True,
                text=True,
            )
            self.assertEqual(ran.returncode, 0, msg=ran.stderr)
        for line in ("rank 0: loss", "rank 1: loss"):
            self.assertIn(line, ran.stdout)


class TestPorting(DTensorContinuousTestBase):
    """Each pair of examples trains alike, on two ranks."""

    world_size = 2

    def _train(self, example):
        names = {}
        exec(EXAMPLE.search(PORTING)[2] + example, names)
        for batch in names["batches"]:
            names["step"](batch)
        values = [param.detach() for param in names["model"].parameters()]
        return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]

    @parametrize("title", PAIRS)
    def test_before_and_after(self, title):
        before, after = self._train(SECTIONS[title]["before"]), self._train(SECTIONS[title]["after"])
        self.assertEqual(before, after)

    def test_checkpoints(self):
        names = {}
        exec(EXAMPLE.search(PORTING)[2] + SECTIONS["Checkpoints"]["after"], names)
        for name, value in names["model"].state_dict().items():
            self.assertIsInstance(value, DTensor)
            self.assertEqual(value.full_tensor(), names["whole"][name])

    def test_sections(self):
        self.assertEqual(PAIRS, ["DDP", "FSDP2", "Accumulation"])


instantiate_parametrized_tests(TestPorting)

if __name__ == "__main__":
    run_tests()
