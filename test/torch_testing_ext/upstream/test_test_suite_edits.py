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

from kit.files import write

from torch_testing_ext.upstream.mapping import UserError

SERIES = Path(__file__).parents[3] / "patches"
sys.path.insert(0, str(SERIES))

import patch_series  # noqa: E402

EDITS = SERIES / "test-suite"

specification = importlib.util.spec_from_file_location("render", EDITS / "render.py")
assert specification is not None and specification.loader is not None
render = importlib.util.module_from_spec(specification)
specification.loader.exec_module(render)

COMPILER = """\
def compiler_fn(no_inductor=False):
    return lambda gm: torch.compile(gm, backend="mine")

class ReplicateTest:
    def _test_compile(self, no_sync):
        for step in (0, 1):
            context = chosen(step)
            context = contextlib.nullcontext()

            with context:
                run()
            if not no_sync or step == 1:
                for mine in models:
                    check(mine)
                for optim in optims:
                    optim.step()

class DDP_TP_Test:
    def test_ddp_tp(self):
        model = torch.compile(model)
        with compiled_autograd._enable(compiler_fn()):
            loss = model(data).sum()
            # TODO: We need something
            with self.assertRaises(AssertionError):
                loss.backward()

        # check(nothing)


if __name__ == "__main__":
    run_tests()
"""
TWO_D = """\
from torch.distributed._tensor import DTensor, Replicate

def init_model():
    _pre_dp_module_transform(twod_model)
    return model, twod_model, dp_pg

class Test2dParallelIntegration:
    def _check_module(self, one, other, check_grad=False):
        pass

    def test_2d_ddp_integration_functionality(self):
        model, twod_model, dp_pg = init_model()
        self._check_module(model, twod_model, check_grad=True)
        self._check_module(model, twod_model)
"""
FSDP = """\
class TestTPFSDPIntegration(Base):
    def move(self, one):
        one.to(self.rank), one.to(self.rank)

    @skip_if_lt_x_gpu(4)
    def test_fsdp_tp_integration(self):
        return [
            CPUOffload(offload_params=True),
        ]

    def _test_fsdp_tp_integration(self, cpu_offload):
        one.to(self.rank), one.to(self.rank), one.to(self.rank)
        FSDP(
            cpu_offload=cpu_offload,
        )
        FSDP(
            cpu_offload=cpu_offload,
        )

    @skip_if_lt_x_gpu(4)
    def test_fsdp_tp_extension_grad(self):
        one.to(self.rank), one.to(self.rank)
        mine = FSDP(model)
        # FSDP comms
        counts[c10d_ops._allgather_base_]
"""
EXAMPLES = """\
class DistTensorParallelExampleTest:
    def _test_mlp_training_e2e(self, recompute_activation):
        if sequence:
            self.assertEqual(
                counts[functional.all_gather_into_tensor], 2
            )
        else:
            self.assertEqual(counts[functional.all_reduce], 1)

    @with_comms
    # TODO: input_reshard
    # @parametrize("recompute_activation", both)
    @parametrize("recompute_activation", one)
    def test_mlp_training(self, recompute_activation):
        pass
"""
FAULT_TOLERANCE = """\
import os
import sys

class AbstractFaultToleranceTest:
    def help(self):
        pass

    def test_reconfigure_basic(self):
        pass


class ReconfigureContractTest(TestCase):
    pass
"""
FILES = {
    "test/distributed/_composable/test_replicate_with_compiler.py": COMPILER,
    "test/distributed/tensor/parallel/test_ddp_2d_parallel.py": TWO_D,
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
