"""A fake PyTorch checkout, on which the commands of `upstream` run."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tempfile
import textwrap
from pathlib import Path

from kit.processes import ROOT as ROOT
from torch_testing_ext.common_utils import TestCase
from torch_testing_ext.upstream.__main__ import main

HELPERS = {
    "common_utils.py": """\
        import unittest
        from typing import Any

        IS_LINUX = True

        class TestCase(unittest.TestCase):
            pass

        def run_tests(argv=None):
            unittest.main()

        def parametrize(name, values):
            return lambda test: test
    """,
    "common_distributed.py": """\
        import os
        from torch.testing._internal.common_utils import TestCase

        TIMEOUT_DEFAULT = 300

        class MultiProcessTestCase(TestCase):
            pass

        def skip_if_lt_x_gpu(x):
            return lambda test: test

        def skip_if_rocm_multiprocess(func):
            return func
    """,
    "common_nn.py": "TEST_CUDA = False\n",
    "distributed/_tensor/common_dtensor.py": "def with_comms(func): ...\n",
    "common_fsdp.py": "class FSDPTest: ...\n",
}


class CheckoutCase(TestCase):
    """A temporary directory with a checkout `pytorch/` (a git repository) and a tree of our own, `ours/`."""

    def setUp(self) -> None:
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.top = Path(directory.name).resolve()
        self.pytorch, self.ours = self.top / "pytorch", self.top / "ours"
        self.ours.mkdir()
        for name, text in HELPERS.items():
            self.put(self.pytorch / "torch/testing/_internal" / name, textwrap.dedent(text))
        self.put(self.pytorch / "torch/testing/_internal/__init__.py", "")
        (self.pytorch / "test").mkdir()
        subprocess.run(["git", "init", "--quiet", self.pytorch], check=True)

    def put(self, file: Path, content: str | bytes) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    def upstream(self, *words: object, code: int = 0) -> tuple[str, str]:
        """Run a command in `ours`, and return its stdout and stderr."""
        out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
        before = os.getcwd()
        os.chdir(self.ours)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                exit_code = main([str(word) for word in words])
                out.flush()
        finally:
            os.chdir(before)
        output = out.buffer.getvalue().decode()
        self.assertEqual(exit_code, code, f"{output}{err.getvalue()}")
        return output, err.getvalue()

    def apply(self, patch: bytes) -> None:
        subprocess.run(["git", "apply", "-"], cwd=self.pytorch, input=patch, check=True)
