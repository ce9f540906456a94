"""The edits of PyTorch's test/: each becomes a patch, and one that does not fit a checkout is an error.

The files of the checkouts here are stand-ins: of PyTorch's files they have only what an edit looks for.
"""

import contextlib
import importlib.util
import io
import re
import sys
import tempfile
import unittest
from pathlib import Path

from kit.files import subject, write

from torch_testing_ext.upstream.mapping import UserError

SERIES = Path(__file__).parents[3] / "patches"
sys.path.insert(0, str(SERIES))

import hardware_rules  # noqa: E402
import patch_series  # noqa: E402

EDITS = SERIES / "test-suite"

specification = importlib.util.spec_from_file_location("render", EDITS / "render.py")
assert specification is not None and specification.loader is not None
render = importlib.util.module_from_spec(specification)
specification.loader.exec_module(render)

COMPILER = subject(__file__, "pytorch_tests/replicate_with_compiler.py")
TWO_D = subject(__file__, "pytorch_tests/composability_2d.py")
FSDP = subject(__file__, "pytorch_tests/fsdp_tp_integration.py")
EXAMPLES = subject(__file__, "pytorch_tests/tp_examples.py")
FAULT_TOLERANCE = subject(__file__, "pytorch_tests/c10d_fault_tolerance.py")
FAULT_TOLERANCE_BY_DEVICE = subject(__file__, "pytorch_tests/c10d_fault_tolerance_by_device.py")
FILES = {
    "test/distributed/_composable/test_replicate_with_compiler.py": COMPILER,
    "test/distributed/_composable/test_composability/test_2d_composability.py": TWO_D,
    "test/distributed/fsdp/test_fsdp_tp_integration.py": FSDP,
    "test/distributed/tensor/parallel/test_tp_examples.py": EXAMPLES,
    "test/distributed/test_c10d_fault_tolerance.py": FAULT_TOLERANCE,
}


class EditsTest(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.checkout = Path(directory.name) / "pytorch"
        for name, source in FILES.items():
            write(self.checkout, name, source)

    def _patch(self, edit) -> tuple[Path, str]:
        file = self.checkout.parent / f"{edit.path.stem}.patch"
        file.write_bytes(edit.patch(self.checkout))
        return file, file.read_text()

    def test_each_edit_becomes_a_patch_of_a_file_below_test(self) -> None:
        edits = render.load()
        self.assertGreaterEqual(len(edits), 5)
        for edit in edits:
            with self.subTest(edit=edit.path.name):
                file, text = self._patch(edit)
                counts = patch_series.git(["--numstat", str(file)], self.checkout).splitlines()
                self.assertEqual([line.split("\t")[2] for line in counts], [str(edit.file)])
                self.assertEqual(edit.file.parts[0], "test")
                message, separator, _ = text.partition("\n---\n")
                self.assertTrue(separator)
                for part in ("Problem:", "Fix:", "Test plan:"):
                    self.assertIn(part, message)
                self.assertRegex(edit.subject, r"^\[.+\] \w")
                self.assertIn(f"Subject: [PATCH] {edit.subject}\n", text)

    def test_all_edits_apply_one_after_the_other(self) -> None:
        patches = [self._patch(edit)[0] for edit in render.load()]
        for patch in patches:
            patch_series.git([str(patch)], self.checkout)
        with self.assertRaises(UserError):
            patch_series.git(["--check", str(patches[0])], self.checkout)

    def test_killed_rank_fits_both_forms_of_its_file(self) -> None:
        [edit] = [edit for edit in render.load() if edit.path.name.startswith("0006")]
        for source, base, call in (
            (FAULT_TOLERANCE, "FaultToleranceTestBase", "_create_reconfigured_pg(self._testMethodName, uuid)"),
            (
                FAULT_TOLERANCE_BY_DEVICE,
                "AbstractFaultToleranceTest",
                "_create_reconfigured_pg(self._testMethodName, uuid, rank_device)",
            ),
        ):
            write(self.checkout, str(edit.file), source)
            patch_series.git([str(self._patch(edit)[0])], self.checkout)
            text = (self.checkout / edit.file).read_text()
            with self.subTest(base=base):
                self.assertIn(f"class GlooKilledRankTest({base}, MultiProcessTestCase):", text)
                self.assertIn(call, text)
                self.assertIn(f"\nclass {base}:\n", text)
                self.assertNotRegex(text, r"(?m)\b[A-Z]*DEVICE\b|\bBASE\b|PARAMETER|# (classification|device)$")
                broken = [rule for rule in hardware_rules.broken_rules(text.encode()) if "GlooKilledRank" in rule]
                self.assertEqual(broken == [], "rank_device" in call, broken)

    def test_an_edit_that_was_applied_is_an_error_afterwards(self) -> None:
        for edit in render.load():
            with self.subTest(edit=edit.path.name):
                patch_series.git([str(self._patch(edit)[0])], self.checkout)
                with self.assertRaisesRegex(UserError, "must match"):
                    edit.patch(self.checkout)

    def test_the_table_names_each_edit(self) -> None:
        table = (EDITS / "README.md").read_text()
        rows = re.findall(r"^\| (\d{4}) ", table, flags=re.MULTILINE)
        self.assertEqual(rows, [edit.path.name[:4] for edit in render.load()])

    def test_the_series_for_wheels_does_not_contain_them(self) -> None:
        for version in ("2.13", "2.15"):
            self.assertNotIn(EDITS, {patch.file.parent for patch in patch_series.load(SERIES, version)})

    def test_a_file_of_another_shape_is_an_error_and_changes_nothing(self) -> None:
        edit = render.load()[0]
        write(self.checkout, str(edit.file), COMPILER.replace("class ReplicateTest", "class OtherTest"))
        with self.assertRaisesRegex(UserError, "0 definitions of ReplicateTest"):
            edit.patch(self.checkout)
        write(self.checkout, str(edit.file), COMPILER.replace("if not no_sync", "if sync"))
        with self.assertRaisesRegex(UserError, "must match 1 times"):
            edit.patch(self.checkout)

    def test_a_definition_that_occurs_twice_is_an_error(self) -> None:
        source = render.Source("class A:\n    pass\nclass A:\n    pass\n", "file.py")
        with self.assertRaisesRegex(UserError, "2 definitions of A"):
            source.sub("A", "pass", "...")

    def test_command(self) -> None:
        out = self.checkout.parent / "out"
        words = ["--pytorch", str(self.checkout), "-o", str(out)]
        self.assertEqual(render.main([*words, "0001", "0003"]), 0)
        self.assertEqual([file.name[:4] for file in sorted(out.iterdir())], ["0001", "0003"])
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            self.assertEqual(render.main([*words, "no such name"]), 2)
            (self.checkout / next(iter(FILES))).unlink()
            self.assertEqual(render.main([*words, "0002"]), 2)
        self.assertIn("no edit has such a name", errors.getvalue())
        self.assertIn("does not exist", errors.getvalue())


if __name__ == "__main__":
    unittest.main()
