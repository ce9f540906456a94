"""Tests that every form of import is rewritten and nothing else, and that rewriting back restores every byte."""

from __future__ import annotations

import sys
from pathlib import Path

from kit.import_forms import EVERY_FORM, FILES, LATIN

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest
from torch_testing_ext.upstream import defined_names, mapping
from torch_testing_ext.upstream.mapping import MIRRORED, MOVED, Side, UserError, module_on, moved_name, split_name
from torch_testing_ext.upstream.rewriting import RewrittenFile, Use, rewrite_file

sys.path.insert(0, str(Path(__file__).parents[3] / "patches"))

import outgoing

EXPECTED = """\
import torch_testing_ext.common_utils
import torch_testing_ext.common_utils as common  # torch.testing._internal.common_utils
from torch_testing_ext import common_distributed, common_utils as cu
from torch_testing_ext.common_distributed import (
from torch_testing_ext.common_fsdp import *
if os.name == "posix": from torch_testing_ext.distributed.fake_pg import FakeStore; x = 1
\tfrom torch_testing_ext.common_utils import NEWER
class T( torch_testing_ext.common_utils.TestCase ):
    @mock.patch('torch_testing_ext.common_utils.run_tests')
    @patch(r"torch_testing_ext.common_distributed.TIMEOUT_DEFAULT", 4)
        from torch_testing_ext.distributed._tensor.common_dtensor import with_comms
        importlib.import_module("torch_testing_ext.common_utils")
        return   torch_testing_ext.common_utils.run_tests , cu.SEED
"""


def to_ours(source: str | bytes) -> RewrittenFile:
    return rewrite_file(source if isinstance(source, bytes) else source.encode(), Side.OURS, Path("test_x.py"))


def to_theirs(source: str | bytes) -> RewrittenFile:
    return outgoing.for_pytorch(source if isinstance(source, bytes) else source.encode(), Path("test_x.py"))


@instantiate_parametrized_tests
class RewritingTest(TestCase):
    def test_every_form(self) -> None:
        rewritten = to_ours(EVERY_FORM)
        before, after = EVERY_FORM.splitlines(), rewritten.source.decode().splitlines()
        changed = [f"{line}\n" for line, old in zip(after, before, strict=True) if line != old]
        self.assertEqual("".join(changed), EXPECTED)
        self.assertEqual(rewritten.notes, ())

    @parametrize("source", [subtest(source, name=name) for name, source in FILES.items()])
    def test_rewriting_back_restores_every_byte(self, source: bytes) -> None:
        there = to_ours(source)
        self.assertEqual(there.source == source, b"_internal" not in source)
        self.assertEqual(to_theirs(there.source).source, source)

    def test_an_encoding_is_kept(self) -> None:
        self.assertIn("'ß'".encode("latin-1"), to_ours(LATIN).source)

    def test_names_used(self) -> None:
        used = {(use.module.removeprefix("torch_testing_ext."), use.name) for use in to_ours(EVERY_FORM).uses}
        expected = {
            ("common_distributed", "MultiProcessTestCase"),
            ("common_distributed", "TIMEOUT_DEFAULT"),
            ("common_distributed", "skip_if_lt_x_gpu"),
            ("common_fsdp", "*"),
            ("common_utils", "IS_LINUX"),
            ("common_utils", "NEWER"),
            ("common_utils", "SEED"),
            ("common_utils", "TestCase"),
            ("common_utils", "run_tests"),
            ("distributed._tensor.common_dtensor", "with_comms"),
            ("distributed.fake_pg", "FakeStore"),
            ("torch.testing._internal.common_nn", "TEST_CUDA"),
        }
        self.assertEqual({use for use in used if use[1]}, expected)

    def test_an_import_that_is_the_only_one_of_torch_stays(self) -> None:
        source = "import torch.testing._internal.common_utils\ntorch.testing._internal.common_utils.run_tests()\n"
        rewritten = to_ours(source)
        self.assertEqual(rewritten.source.decode(), source)
        self.assertIn("add `import torch`", rewritten.notes[0])

    @parametrize(
        "source,expected",
        [
            (
                "from torch.testing._internal import common_nn, common_utils as cu  # c",
                "from torch.testing._internal import common_nn; from torch_testing_ext import common_utils as cu  # c",
            ),
            (
                "from torch.testing._internal import common_utils, common_fsdp, common_nn, common_distributed; x",
                "from torch_testing_ext import common_utils, common_fsdp; "
                "from torch.testing._internal import common_nn; from torch_testing_ext import common_distributed; x",
            ),
            (
                "if x: from torch.testing._internal import common_nn, common_utils",
                "if x: from torch.testing._internal import common_nn; from torch_testing_ext import common_utils",
            ),
        ],
    )
    def test_a_statement_is_split_where_a_module_stays(self, source: str, expected: str) -> None:
        rewritten = to_ours(f"{source}\n")
        self.assertEqual(rewritten.source.decode(), f"{expected}\n")
        self.assertEqual(rewritten.notes, ())
        self.assertEqual(to_theirs(rewritten.source).source.decode(), f"{source}\n")

    def test_a_statement_over_several_lines_is_left_with_a_note(self) -> None:
        source = "from torch.testing._internal import (\n    common_nn, common_utils,\n)\n"
        rewritten = to_ours(source)
        self.assertEqual(rewritten.source.decode(), source)
        self.assertIn("line 1: only common_utils", rewritten.notes[0])
        self.assertEqual(rewritten.uses, (Use("torch.testing._internal", "common_nn", 1),))

    def test_unusual_spaces_are_left_with_a_note(self) -> None:
        source = "from torch.testing . _internal.common_utils import TestCase\n"
        rewritten = to_ours(source)
        self.assertEqual(rewritten.source.decode(), source)
        self.assertIn("line 1", rewritten.notes[0])

    def test_a_syntax_error_is_reported_with_its_line(self) -> None:
        with self.assertRaisesRegex(UserError, r"test_x.py:2: not valid Python"):
            to_ours("import torch\nfrom torch import (\n")
        with self.assertRaisesRegex(UserError, "cannot be decoded"):
            to_ours(b"'\xff'\n")

    def test_our_modules_without_a_counterpart_are_used_unchanged(self) -> None:
        source = "from torch_testing_ext.hypothesis_utils import given\nimport torch_testing_ext.launch\n"
        rewritten = to_theirs(source)
        self.assertEqual(rewritten.source.decode(), source)
        ours = Use("torch_testing_ext.hypothesis_utils", "given", 1), Use("torch_testing_ext.launch", "", 2)
        self.assertEqual(rewritten.uses, ours)


class MappingTest(TestCase):
    def test_the_table_works_both_ways(self) -> None:
        self.assertEqual(len({pair.theirs for pair in MIRRORED}), len(MIRRORED))
        for pair in MIRRORED:
            self.assertEqual(module_on(Side.THEIRS, pair.ours), pair.theirs)
            self.assertEqual(module_on(Side.OURS, pair.theirs), pair.ours)

    def test_a_dotted_name_is_split_after_its_module(self) -> None:
        self.assertEqual(
            split_name("torch.testing._internal.common_utils.TestCase.setUp", Side.OURS),
            ("torch.testing._internal.common_utils", "TestCase.setUp"),
        )
        self.assertIsNone(split_name("torch.testing._internal.common_nn.X", Side.OURS))

    def test_moved_names_are_at_their_new_place(self) -> None:
        for now, before, _ in MOVED:
            module, _, name = now.rpartition(".")
            self.assertIn(name, defined_names.defined_in(mapping.find_source(module)))
            self.assertIn(before, moved_name(now) or "")
            self.assertIn(now, moved_name(before) or "")
        self.assertIsNone(moved_name("torch.testing._internal.common_utils.TestCase"))


if __name__ == "__main__":
    run_tests()
