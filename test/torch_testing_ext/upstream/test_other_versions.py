"""Advice on a file of PyTorch's that needs a name which the installed torch lacks."""

from __future__ import annotations

import textwrap

from kit.files import FolderCase
from kit.processes import clean_environ
from kit.warm import run_warm

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.upstream.other_versions import advice

# What a file executes, and the module of torch that lacks a name; none, if the error is another one.
SOURCES = {
    "from torch.distributed import from_the_future": "torch.distributed",
    "import torch.distributed.from_the_future": "torch.distributed.from_the_future",
    "import torch; torch.from_the_future": "torch",
    "import from_the_future": "",
    "from json import from_the_future": "",
    "import torch; torch.ones(1).from_the_future": "",
    "raise ValueError('torch')": "",
}


@instantiate_parametrized_tests
class OtherVersionsTest(FolderCase):
    @parametrize("source", list(SOURCES))
    def test_advice(self, source: str) -> None:
        path = str(self.write("checkout/test/distributed/test_x.py", source))
        for version in ("another version of PyTorch", "PyTorch 2.16.0a0"):
            with self.assertRaises(Exception) as raised:
                exec(compile(source, path, "exec"), {})
            text = advice(raised.exception, path)
            self.assertEqual(bool(text), bool(SOURCES[source]))
            if text:
                self.assertRegex(text, rf"^The file is of {version}, and .* of {SOURCES[source]}\.\n")
            self.write("checkout/version.txt", "2.16.0a0\n")

    @parametrize("source", ["graph_utils import dump_graphs_to_files", "api import COMPILED_OBJECT_KEY"])
    def test_what_a_removed_package_had(self, source: str) -> None:
        """No torch that is supported has it, and no newer file asks for it: the usual advice would lead nowhere."""
        program = f"""
            from torch_testing_ext.upstream import drop_in

            drop_in.install()
            try:
                from torch.distributed._spmd.{source}
            except ImportError as error:
                print(drop_in.advice(error, "test_x.py"))
        """
        path = self.write("removed.py", textwrap.dedent(program))
        done = run_warm(str(path), cwd=self.root, env=clean_environ())
        have = "torch.distributed._spmd.api and torch.distributed._spmd.parallel_mode"
        self.assertRegex(done.stdout, rf"^PyTorch 2.5 removed torch.distributed._spmd, .*\nThis package has {have} ")
        self.assertNotIn("git checkout", done.stdout)


if __name__ == "__main__":
    run_tests()
