"""For run.py: the mirrored modules of torch_testing_ext are PyTorch's own, in every interpreter that has this file as
its sitecustomize. Who asks one of them for a name that PyTorch has not, is told so, and cannot run there."""

import importlib
import importlib.abc
import importlib.machinery
import sys

OURS, THEIRS = "torch_testing_ext", "torch.testing._internal"
MIRRORED = {
    f"{OURS}.common_utils",
    f"{OURS}.common_distributed",
    f"{OURS}.common_fsdp",
    f"{OURS}.common_dist_composable",
    f"{OURS}.distributed._tensor.common_dtensor",
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in MIRRORED else None

    def create_module(self, spec):
        self._own = importlib.import_module(spec.name.replace(OURS, THEIRS, 1))
        self._spec = self._own.__spec__
        return self._own

    def exec_module(self, module):
        module.__spec__ = self._spec  # it is imported already, under its own name


sys.meta_path.insert(0, Finder())
