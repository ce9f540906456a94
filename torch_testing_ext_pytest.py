"""The entry point for pytest: loads `torch_testing_ext.pytest_plugin` without having pytest rewrite our modules.

pytest rewrites the assertions of every module of a distribution that has a plugin: some 200 files of ours, which have
none, at the first start; and the results would stay behind when the package is uninstalled.
"""

import sys

_finders = [*sys.meta_path]
sys.meta_path[:] = [finder for finder in _finders if not hasattr(finder, "mark_rewrite")]
try:
    from torch_testing_ext._process import own_imports
finally:
    sys.meta_path[:] = _finders
# Before pytest's: it finds all other modules of the package.
own_imports.go_first()

pytest_plugins = ("torch_testing_ext.pytest_plugin",)
