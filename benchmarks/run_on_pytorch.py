"""Replaces the mirror modules of torch_testing_ext with PyTorch's own, in interpreters with this file as sitecustomize.

run.py puts it there. A file that imports a name that PyTorch lacks fails with an ImportError, and does not run. If one
of our modules was loaded all the same, by a finder that came first, a file named "not-replaced" appears next to this.
"""

import atexit
import importlib
import importlib.abc
import importlib.machinery
import sys
from pathlib import Path

OURS, THEIRS = "torch_testing_ext", "torch.testing._internal"
MIRRORED = {
    f"{OURS}.common_utils",
    f"{OURS}.common_distributed",
    f"{OURS}.common_fsdp",
    f"{OURS}.common_dist_composable",
    f"{OURS}.distributed._tensor.common_dtensor",
}


class PyTorchFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a mirror module, and loads PyTorch's module of that name instead."""

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in MIRRORED else None

    def create_module(self, spec):
        self._module = importlib.import_module(spec.name.replace(OURS, THEIRS, 1))
        self._spec = self._module.__spec__
        return self._module

    def exec_module(self, module):
        module.__spec__ = self._spec  # the module is already imported, under its own name


def check_modules():
    names = [name for name in MIRRORED if name in sys.modules and sys.modules[name].__name__ == name]
    if names:
        Path(__file__).with_name("not-replaced").write_text("\n".join(names))


sys.meta_path.insert(0, PyTorchFinder())
atexit.register(check_modules)
