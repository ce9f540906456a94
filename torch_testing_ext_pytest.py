"""The entry point for pytest: loads `torch_testing_ext.pytest_plugin` without having pytest rewrite our modules.

pytest rewrites the assertions of every module of a distribution that has a plugin: some 200 files of ours, which have
none, at the first start; and the results would stay behind when the package is uninstalled.
"""

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_PACKAGE = "torch_testing_ext"
pytest_plugins = (f"{_PACKAGE}.pytest_plugin",)


class _PlainImports:
    """Finds our modules before pytest's import hook does: as all the other finders do."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != _PACKAGE:
            return None
        for finder in sys.meta_path:
            if finder is _PlainImports or type(finder).__module__.startswith("_pytest.") or _is_old(finder):
                continue
            if (found := finder.find_spec(name, path, target)) is not None:
                return found
        return None


def _is_old(finder: object) -> bool:
    """Whether a finder knows `find_module` alone, as those of old packages do."""
    return not hasattr(finder, "find_spec")


sys.meta_path.insert(0, _PlainImports)
