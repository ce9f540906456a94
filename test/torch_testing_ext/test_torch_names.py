"""Only `_torch/` knows torch's inside: docs/tools/torch_names.py finds what others know."""

import ast
import sys
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
    return [finding.what for finding in torch_names.findings(ast.parse(text), frozenset(["_known"]))]


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
            ("NAME = '_x'\ndef f(step):\n    getattr(step, NAME)", "uses _x of step"),
            ("import torch\ngetattr(torch, f'_cuda_{name}')", "uses _cuda_ of torch"),
            ("import torch\ngetattr(torch, '_' + name)", "uses _ of torch"),
            ("operator.attrgetter('_version')(tensor)", "uses _version"),
            ("import torch\ntorch.load(f, _quiet=True)", "passes _quiet to torch.load"),
            ("def f(it):\n    match it:\n        case Spec(_mesh=mesh): pass", "uses _mesh"),
            # torch's, although the file has one of this name.
            ("def f(self):\n    self._known = 1\n    return other._known", "uses other._known"),
            ("vars(parameter)['_known'] = True", "names _known"),
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
            ("mock.patch('torch.distributed.barrier', f)", "replaces torch.distributed.barrier"),
            ("import torch\nfor kind in (torch.Tensor, int):\n    kind.item = f", "replaces kind.item"),
            ("import torch\na, b = torch, 1\na.manual_seed = f", "replaces a.manual_seed"),
            ("import torch\nif c := torch.cuda:\n    c.init = f", "replaces c.init"),
            ("cuda = sys.modules['torch.cuda']\ncuda.init = f", "replaces cuda.init"),
            ("NAME = 'torch.cuda'\ncuda = importlib.import_module(NAME)\ncuda.init = f", "replaces cuda.init"),
        ):
            with self.subTest(text):
                self.assertEqual(found_in(text), [what])

    def test_texts_of_errors(self):
        in_handler = "try: f()\nexcept RuntimeError as error:\n    "
        in_function = "def f(error: BaseException):\n    "
        for text, what in (
            (f"{in_handler}'timed out' in str(error)", "'timed out' in str(error)"),
            (f"{in_handler}text = str(error)\n    text.startswith('x')", "text.startswith('x')"),
            (f"{in_function}return re.search('x', str(error))", "re.search('x', str(error))"),
            (f"{in_function}return error.args[0] == 'x'", "error.args[0] == 'x'"),
        ):
            with self.subTest(text):
                self.assertEqual(found_in(text), [f"reads the text of an error: {what}"])

    def test_names_of_frames_and_threads(self):
        for text, what in (
            ("frame.f_code.co_name == 'backward'", "reads the name of a frame: frame.f_code.co_name == 'backward'"),
            ("NAMES = ('a', 'b')\ncode.co_name in NAMES", "reads the name of a frame: code.co_name in NAMES"),
            ("code.co_filename.endswith('c.py')", "reads the name of a frame: code.co_filename.endswith('c.py')"),
            ("frame.f_locals['self']", "reads frame.f_locals['self']"),
            ("frame.f_locals.get('self')", "reads frame.f_locals.get('self')"),
            ("name == 'pt_new_loop'", "names the thread pt_new_loop"),
        ):
            with self.subTest(text):
                self.assertEqual(found_in(text), [what])

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
            "code.co_filename == __file__",
            "variables = frame.f_locals\nvariables['x']",
            "def f(error: ImportError, other: Exception):\n    'x' in str(error)\n    str(other).strip()",
            "import torch\nx = torch.ones(1)\nx.grad = None",
            "getattr(test, '_torch_testing_ext_needs')",
        ):
            with self.subTest(text):
                self.assertEqual(found_in(text), [])


if __name__ == "__main__":
    run_tests()
