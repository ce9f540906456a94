"""The command that converts the tests of other projects: each rule on a small file, and the command's own behaviour."""

from __future__ import annotations

import contextlib
import io
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from torch_testing_ext import moving as moving
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.upstream.converting import convert_file
from torch_testing_ext.upstream.other_projects import PROJECTS

OURS = "from torch_testing_ext.compat"
CASES = {
    "a name of several": (
        "deepspeed",
        "import os\nfrom unit.common import DistributedTest, preferred_dtype  # why\n",
        f"import os\nfrom unit.common import preferred_dtype  # why\n{OURS}.deepspeed import DistributedTest\n",
    ),
    "a module by its last part, indented": (
        "deepspeed",
        "try:\n    from ..common import DistributedFixture as Fixture\nexcept ImportError:\n    pass\n",
        f"try:\n    {OURS}.deepspeed import DistributedFixture as Fixture\nexcept ImportError:\n    pass\n",
    ),
    "names on lines of their own": (
        "accelerate",
        "from accelerate import (\n    a,  # first\n    debug_launcher,\n)\n\nx = 'é'\n",
        f"from accelerate import (\n    a,  # first\n)\n{OURS}.accelerate import debug_launcher\n\nx = 'é'\n",
    ),
    "the last name, without a comma": (
        "accelerate",
        "from accelerate import (A,\n    debug_launcher)\n",
        f"from accelerate import (A)\n{OURS}.accelerate import debug_launcher\n",
    ),
    "a function of a module": (
        "spawn",
        "import torch.multiprocessing as mp\n\nmp.spawn( f , args=(1,), nprocs=2)\nmp.Queue()\n",
        f"import torch.multiprocessing as mp\n{OURS}.torch_multiprocessing import mp_spawn\n\n"
        "mp_spawn( f , args=(1,), nprocs=2)\nmp.Queue()\n",
    ),
    "a function under another name": (
        "spawn",
        "from torch.multiprocessing import spawn\nspawn(f, nprocs=2)\n",
        f"{OURS}.torch_multiprocessing import mp_spawn as spawn\nspawn(f, nprocs=2)\n",
    ),
    "a class, and a call of it": (
        "torchmetrics",
        "from torch.multiprocessing import Pool\n\n\n# begins\ndef pytest_sessionstart():\n    pool = Pool(2)\n",
        f"{OURS}.torch_multiprocessing import Pool\n\n\n# begins\ndef pytest_sessionstart():\n    pool = Pool(2)\n",
    ),
    "PyTorch's kit": (
        "torchtitan",
        "from torch.testing._internal.common_utils import run_tests\n",
        "from torch_testing_ext.common_utils import run_tests\n",
    ),
    "nothing of the project": ("torchrec", "import os;x=1   # odd\n", "import os;x=1   # odd\n"),
    "the harness itself": (
        "deepspeed",
        "class DistributedTest:\n    def _launch_procs(self): ...\n",
        "class DistributedTest:\n    def _launch_procs(self): ...\n",
    ),
}


class ConvertingTest(unittest.TestCase):
    def test_rules(self) -> None:
        for title, (project, before, after) in CASES.items():
            for newline in ("\n", "\r\n"):
                with self.subTest(title=title, newline=newline):
                    old, new = (text.replace("\n", newline).encode() for text in (before, after))
                    self.assertEqual(convert_file(old, PROJECTS[project], Path("t.py")).source.decode(), new.decode())
                    self.assertEqual(convert_file(new, PROJECTS[project], Path("t.py")).source, new, "a second time")

    def test_left_by_hand(self) -> None:
        source = b"from unit.common import *\n\nclass T(DistributedTest):\n    def _launch_procs(self): ...\n"
        converted = convert_file(source, PROJECTS["deepspeed"], Path("t.py"))
        self.assertEqual(converted.source, source)
        self.assertEqual([line for line, _ in converted.by_hand], [1, 4])
        self.assertIn("DistributedTest", converted.by_hand[0][1])
        source = b"pool = Pool(2)\npool.starmap(setup_ddp, [(0, 1)])\n"
        converted = convert_file(source, PROJECTS["torchmetrics"], Path("t.py"))
        self.assertEqual((converted.source, [line for line, _ in converted.by_hand]), (source, [2]))


class CommandTest(unittest.TestCase):
    def run_command(self, *words: object) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = moving.main([str(word) for word in words])
        return code, out.getvalue(), err.getvalue()

    def test_files(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            good, bad, binary = folder / "a" / "good.py", folder / "bad.py", folder / "binary.py"
            good.parent.mkdir()
            good.write_text("from unit.common import DistributedTest\n")
            bad.write_text("from unit.common import DistributedTest\nx = = 1\n")
            binary.write_bytes(b"# DistributedTest \xff\xfe\n")
            untouched = {path: path.read_bytes() for path in (bad, binary)}

            code, out, err = self.run_command("--diff", "deepspeed", folder)
            self.assertEqual(code, 1)
            self.assertIn("+from torch_testing_ext.compat.deepspeed import DistributedTest", out)
            self.assertIn("1 files would change", err)
            self.assertIn("unit.common", good.read_text())

            code, out, err = self.run_command("deepspeed", folder, good)
            self.assertEqual((code, out), (1, f"converted {good}\n"))
            self.assertEqual(good.read_text(), "from torch_testing_ext.compat.deepspeed import DistributedTest\n")
            self.assertEqual({path: path.read_bytes() for path in untouched}, untouched)
            for path in untouched:
                self.assertIn(f"{path}: not converted: ", err)
            code, out, err = self.run_command("deepspeed", good)
            self.assertEqual((code, out), (0, ""))
            self.assertIn("0 files changed, 1 unchanged", err)

    def test_wrong_use(self) -> None:
        code, _, err = self.run_command("deepspeed", "/nowhere/at_all")
        self.assertEqual((code, err.count("\n")), (2, 1))
        with mock.patch.dict("sys.modules", libcst=None):
            code, _, err = self.run_command("deepspeed", __file__)
        self.assertEqual((code, err.count("\n")), (2, 1))
        self.assertIn("pip install", err)


if __name__ == "__main__":
    run_tests()
