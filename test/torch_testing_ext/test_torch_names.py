"""Only `_torch/` knows torch's inside: docs/tools/torch_names.py finds what others know."""

import ast
import sys
import textwrap
import unittest
from pathlib import Path

import torch_testing_ext
from torch_testing_ext._torch import torch_frames
from torch_testing_ext._torch.signs import native_threads
from torch_testing_ext.common_utils import run_tests

PACKAGE = Path(torch_testing_ext.__file__).resolve().parent
sys.path.insert(0, str(PACKAGE.parent / "docs" / "tools"))

import torch_names  # noqa: E402


def found_in(text):
    return [finding.what for finding in torch_names.findings(ast.parse(textwrap.dedent(text)))]


def trees():
    files = sorted(PACKAGE.rglob("*.py"))
    return {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def ours_imported_by(tree):
    """The dotted names of this package that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == "torch_testing_ext")


class TorchNamesTest(unittest.TestCase):
    def test_the_package(self):
        sources = trees()
        self.assertEqual([*torch_names.outside(sources)], [])
        # Names of torch's threads, frames and files: a rule that another folder has is one that nobody finds.
        signs = {*native_threads.SERVING_THREADS, *torch_frames.VOTES, *torch_frames.AROUND_CALLS}
        signs |= {*torch_frames.FOR_JOIN, *torch_frames.ARGUMENTS}
        for name, tree in sources.items():
            if not name.startswith(torch_names.KNOWS_TORCH):
                words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
                self.assertEqual({word for word in words if isinstance(word, str)} & signs, set(), name)

    def test_each_module_has_its_tests(self):
        """They take the module by itself: it works without the rooms above."""
        for path in sorted((PACKAGE / "_torch").rglob("[!_]*.py")):
            name = path.relative_to(PACKAGE).with_suffix("").as_posix()
            with self.subTest(name):
                file = Path(__file__).parent / Path(name).parent / f"test_{path.name}"
                found = {*ours_imported_by(ast.parse(file.read_text(encoding="utf-8")))}
                module = f"torch_testing_ext.{name.replace('/', '.')}"
                self.assertTrue({one for one in found if one.startswith(module)}, "they do not import it")
                self.assertEqual({one.split(".")[1] for one in found if "." in one}, {"_torch"})

    def test_private_names(self):
        for text, what in (
            ("import torch\ntorch._C", "uses torch._C"),
            ("import torch._dynamo", "imports torch._dynamo"),
            ("import torch.distributed as dist\nc10d: Any = dist\nc10d.a._b", "uses c10d.a._b"),
            ("from torch.distributed import _tensor", "imports torch.distributed._tensor"),
            ("from torch.utils import data as d\nd._x(1)", "uses d._x"),
            ("def f():\n    from torch._inductor import config", "imports torch._inductor.config"),
            ("import_module('torch._inductor.codecache')", "names torch._inductor.codecache"),
            ("def f(tensor):\n    return tensor._version", "uses tensor._version"),
            ("def f(func):\n    func()._schema.name", "uses func()._schema"),
            ("def f(step):\n    hasattr(step, '_wrapped')", "uses _wrapped of step"),
        ):
            with self.subTest(text):
                self.assertEqual(found_in(text), [what])

    def test_replaced_functions(self):
        for text, what in (
            ("import torch.distributed as dist\ndist.barrier = f", "replaces dist.barrier"),
            ("import torch\ndel torch.Tensor.item", "replaces torch.Tensor.item"),
            ("import torch\nsetattr(getattr(torch, n), 'x', f)", "replaces a part of getattr(torch, n)"),
            ("import torch\nmock.patch.object(torch.cuda, 'init', f)", "replaces a part of torch.cuda"),
            ("from torch import Tensor\nkind: Any = Tensor\nkind.item = f", "replaces kind.item"),
        ):
            with self.subTest(text):
                self.assertEqual(found_in(text), [what])

    def test_texts_of_errors(self):
        text = """
            try: f()
            except RuntimeError as error:
                if "timed out" in str(error): pass
        """
        self.assertEqual(found_in(text), ["reads the text of an error: 'timed out' in str(error)"])

    def test_harmless(self):
        for text in (
            "import torch\ntorch.__version__\ntorch.a.b",
            "'torch._C in prose'",
            "import sys\nsys._getframe()",
            "class A:\n    def f(self, other):\n        self._a = 1\n        return other._a, self._b, super()._c",
            "from torch_testing_ext import _torch\nfrom . import _a\n_torch.b",
            "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
            "def f(test):\n    test._testMethodName",
            "try: f()\nexcept OSError as error:\n    print(str(error))",
        ):
            with self.subTest(text):
                self.assertEqual(found_in(text), [])


if __name__ == "__main__":
    run_tests()
