"""Needs of a platform and of imports."""

import sys
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from .needs import TEST_SKIPS, F, Need, TestSkip, requires


def skip_if_win32() -> Callable[[Any], Any]:
    return unittest.skipIf(sys.platform == "win32", "This test does not run on Windows")


def skip_if_rocm(func: F) -> F:
    skip = unittest.skipIf(torch.version.hip is not None, TEST_SKIPS["skipIfRocm"].message)
    return skip(func)


skip_if_rocm_multiprocess = skip_if_rocm


def import_transformers_or_skip() -> Callable[[F], F]:
    def unmet() -> TestSkip | None:
        return None if find_spec("transformers") else TEST_SKIPS["importerror"]

    return requires(Need(unmet))
