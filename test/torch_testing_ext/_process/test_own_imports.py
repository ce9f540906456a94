"""What our modules import, where files of the user's hide parts of Python's library."""

import contextlib
import importlib
import resource
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
from kit.processes import run_python
from kit.with_accelerators import in_a_fork

from torch_testing_ext._process import own_imports


class TestOwnImports(unittest.TestCase):
    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = [str(self.folder), *sys.path]
        stack.enter_context(mock.patch.object(sys, "path", path))
        stack.enter_context(mock.patch.dict(sys.modules))
        for name in [name for name in sys.modules if name.partition(".")[0] in ("this", "wave", "xmlrpc", "msvcrt")]:
            del sys.modules[name]

    def hide(self, name, text="mine = True"):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()

    def test_ours_come_from_the_library_and_the_users_from_the_folder(self):
        self.hide("wave.py")
        import wave as theirs

        with own_imports():
            import wave as ours
        self.assertTrue(hasattr(ours, "Wave_read"))
        self.assertTrue(theirs.mine)
        self.assertIs(sys.modules["wave"], theirs)
        with own_imports():
            self.assertIs(importlib.import_module("wave"), ours)

    def test_the_user_imports_later(self):
        self.hide("wave.py")
        with own_imports():
            importlib.import_module("wave")
        self.assertTrue(importlib.import_module("wave").mine)

    def test_a_package_hides_a_package(self):
        self.hide("xmlrpc/__init__.py")
        self.hide("xmlrpc/own.py")
        own = importlib.import_module("xmlrpc.own")
        with own_imports():
            self.assertTrue(importlib.import_module("xmlrpc.client").ServerProxy)
        self.assertIs(sys.modules["xmlrpc.own"], own)
        self.assertNotIn("xmlrpc.client", sys.modules)

    def test_a_folder_without_init_hides_nothing(self):
        self.hide("wave/x.py")
        with own_imports():
            ours = importlib.import_module("wave")
        self.assertIs(sys.modules["wave"], ours)

    def test_what_was_imported_before_the_folder_came_stays(self):
        before = importlib.import_module("wave")
        with mock.patch.object(sys, "path", sys.path[1:]), own_imports():
            pass
        self.hide("wave.py")
        with own_imports():
            self.assertIs(importlib.import_module("wave"), before)
        self.assertIs(sys.modules["wave"], before)

    @in_a_fork
    def test_a_process_that_was_forked_copies_no_memory_of_modules(self):
        with mock.patch.object(sys, "path", sys.path[1:]):
            importlib.import_module("wave")
        # The file came after the import, as a folder of tools on the way: it hides nothing.
        self.hide("wave.py")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        with own_imports():
            pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        self.assertLess(pages, len(sys.modules) / 4)

    def test_a_module_of_another_platform(self):
        self.hide("msvcrt.py")
        with own_imports(), self.assertRaises(ModuleNotFoundError):
            importlib.import_module("msvcrt")

    def test_another_version_of_a_requirement_is_used_by_all(self):
        self.hide("expecttest/__init__.py")
        before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "expecttest"}
        self.addCleanup(sys.modules.update, before)
        with own_imports():
            self.assertTrue(importlib.import_module("expecttest").mine)
        del sys.modules["expecttest"]

    def test_a_requirement_that_the_folder_itself_has(self):
        self.hide("hypothesis.py")
        for name in [name for name in sys.modules if name.partition(".")[0] == "hypothesis"]:
            del sys.modules[name]
        nowhere = mock.patch.object(own_imports, "_find_behind", lambda name: None)
        with nowhere, own_imports():
            self.assertTrue(importlib.import_module("hypothesis").mine)

    def test_a_module_of_ours_is_imported_so(self):
        self.hide("shlex.py")
        for name in ("shlex", "torch_testing_ext._process.shell_words"):
            sys.modules.pop(name, None)
        module = importlib.import_module("torch_testing_ext._process.shell_words")
        self.assertEqual(module.shlex.quote("a b"), "'a b'")
        self.assertNotIn("shlex", sys.modules)

    def test_the_package_is_imported_again(self):
        with mock.patch.object(sys, "meta_path", [*sys.meta_path]):
            for name in [name for name in sys.modules if name.partition(".")[0] == "torch_testing_ext"]:
                del sys.modules[name]
            again = importlib.import_module("torch_testing_ext._process")
            self.assertNotIn(own_imports, sys.meta_path)
            self.assertIs(sys.meta_path[0], again.own_imports)
            self.assertTrue(importlib.import_module("torch_testing_ext._process.words"))
            # Whichever is asked first, none asks the other.
            sys.meta_path.append(own_imports)
            with self.assertRaises(ModuleNotFoundError):
                importlib.import_module(f"{again.__name__}.there_is_no_such_module")


@pytest.mark.slow
class TestCommands(unittest.TestCase):
    """In new interpreters: pytest, the runner, and those that these start."""

    _TEST = """\
import pytest, torch

@pytest.mark.world_size(2)
def test_sum(dist_env):
    torch.distributed.barrier()
"""

    def run_beside(self, program, *words):
        names = ("array", "configparser", "expecttest", "fcntl", "functools", "resource", "shlex", "statistics")
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
            for name in names:
                Path(folder, f"{name}.py").write_text("mine = True")
            Path(folder, "test_x.py").write_text(self._TEST)
            code = f"import os, sys; os.chdir({folder!r}); sys.path.remove(''); {program}"
            done = run_python("-c", code, *words, "test_x.py", TORCH_TESTING_EXT_WARM="0", HOME=cache)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("1 passed", done.stdout)

    def test_pytest(self):
        self.run_beside("import pytest; sys.exit(pytest.main())", "-p", "no:cacheprovider")

    def test_the_runner(self):
        self.run_beside("from torch_testing_ext.runner.cli import console; sys.exit(console())")


if __name__ == "__main__":
    unittest.main()
