"""Test files written for PyTorch's own kit run with ours after a rewrite of their imports alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import torch_testing_ext
from torch_testing_ext.common_utils import TestCase, run_tests

pytestmark = pytest.mark.slow

SAMPLES = sorted(Path(__file__).parent.glob("sample_*.py"))
THEIRS, OURS = "torch.testing._internal", "torch_testing_ext"
TESTS = (
    8,  # sample_threads
    8,  # sample_dtensor
    4,  # sample_fsdp
    6,  # sample_continuous
    7,  # sample_helpers
)
SKIPPED = 4
PACKAGE_PARENT = str(Path(torch_testing_ext.__file__).parents[1])


class TestSamples(TestCase):
    def test_all(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            for sample in SAMPLES:
                source = sample.read_text()
                self.assertIn(THEIRS, source)
                Path(directory, sample.name).write_text(source.replace(THEIRS, OURS))
            done = subprocess.run(
                [sys.executable, "-m", "unittest", *(sample.stem for sample in SAMPLES)],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": PACKAGE_PARENT, "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.assertRegex(done.stdout, rf"Ran {sum(TESTS)} tests in ")
        self.assertRegex(done.stdout, rf"\nOK \(skipped={SKIPPED}\)\n")


if __name__ == "__main__":
    run_tests()
