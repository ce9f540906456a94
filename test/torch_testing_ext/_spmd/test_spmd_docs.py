"""The example in docs/spmd.md runs as the page describes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from torch_testing_ext.common_utils import TestCase, run_tests

ROOT = Path(__file__).resolve().parents[3]


class TestSPMDDocs(TestCase):
    """The example of the page under torchrun."""

    def test_example_under_torchrun(self):
        page = (ROOT / "docs" / "spmd.md").read_text()
        example = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "train.py")
            script.write_text(example)
            ran = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                text=True,
            )
        self.assertEqual(ran.returncode, 0, msg=ran.stderr)
        for line in ("rank 0: loss", "rank 1: loss", "train_step: engine on 2 ranks", "AdamW updates the rank's rows"):
            self.assertIn(line, ran.stdout)


if __name__ == "__main__":
    run_tests()
