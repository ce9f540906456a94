"""What the suites, edits and patches name of PyTorch is there, in the newest of PyTorch that could be read."""

import contextlib
import io
import json
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

from kit.files import FolderCase

SERIES = Path(__file__).parents[3] / "patches"
sys.path.insert(0, str(SERIES))

import hardware_rules  # noqa: E402
import pytorch_paths  # noqa: E402

# PyTorch has deleted them; docs/contribute/suites.md says where their tests went.
GONE = {
    "test/distributed/_spmd/test_data_parallel.py",
    "test/distributed/tensor/parallel/test_ddp_2d_parallel.py",
}


class PytorchPathsTest(FolderCase):
    def test_the_record_is_whole(self):
        """`python patches/pytorch_paths.py --pytorch CHECKOUT` renews it."""
        record = json.loads(pytorch_paths.RECORD.read_text())
        self.assertRegex(record["recorded"], r"^\d{4}-\d\d-\d\d$")
        self.assertEqual(set(record["paths"]), set(pytorch_paths.named()))

    def test_each_edit_and_patch_has_its_target(self):
        paths = json.loads(pytorch_paths.RECORD.read_text())["paths"]
        gone = {path for path, seen in paths.items() if seen is None}
        self.assertEqual(gone, GONE)
        for path in gone:
            self.assertEqual(pytorch_paths.named()[path], {"suite"}, path)
        page = (SERIES.parent / "docs" / "contribute" / "suites.md").read_text()
        for path in gone:
            self.assertIn(f"| `{Path(path).stem}` | gone", page)

    def test_suites_keep_the_rules_for_devices_or_are_exempt(self):
        """A suite that PyTorch's list drops, or a new one, declares what its classes need."""
        record = json.loads(pytorch_paths.RECORD.read_text())
        broken = {
            pytorch_paths.path_of(suite): rules
            for suite in pytorch_paths.suites()
            if (rules := list(hardware_rules.broken_rules(suite.read_bytes())))
        }
        unsent = GONE | set(record["exempt"])
        self.assertEqual({path: rules for path, rules in broken.items() if path not in unsent}, {})
        self.assertLessEqual(unsent, set(broken), "these need no exemption")

    def test_a_checkout_without_a_file(self):
        for path in sorted(pytorch_paths.named())[1:]:
            self.write(path, "")
        exempt = [pytorch_paths.path_of(suite) for suite in pytorch_paths.suites()][:2]
        self.write("tools/linter/adapters/test_linter_allowlist.json", json.dumps([*exempt, "test/test_x.py"]))
        git = ["git", "-C", str(self.root), "-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), mock.patch.object(pytorch_paths, "RECORD", self.root / "record.json"):
            self.assertEqual(pytorch_paths.main(["--pytorch", str(self.root)]), 0)
        first = sorted(pytorch_paths.named())[0]
        self.assertIn(f"gone: {first}, named by 0003-ddp-2d-compare-parameters.py", said.getvalue())
        record = json.loads((self.root / "record.json").read_text())
        self.assertEqual(record["exempt"], exempt)
        paths = record["paths"]
        self.assertIsNone(paths.pop(first))
        self.assertEqual(len(set(paths.values())), 1)


if __name__ == "__main__":
    unittest.main()
