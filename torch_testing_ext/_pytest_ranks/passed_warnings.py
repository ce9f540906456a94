"""Warnings that another process has recorded for a test: they are raised once more in pytest's own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress

from torch_testing_ext.launch import OwnWarning


def pack(warning: warnings.WarningMessage) -> OwnWarning:
    """Turn a recorded warning into what a message can hold."""
    category = f"{warning.category.__module__}.{warning.category.__qualname__}"
    return OwnWarning(str(warning.message), category, warning.filename, warning.lineno)


def warn_again(packed: Iterable[OwnWarning]) -> None:
    """Raise each different warning once."""
    for text, name, file, line in dict.fromkeys(OwnWarning(*one) for one in packed):
        with suppress(Warning):  # made an error by a filter here, but not there
            warnings.warn_explicit(_warning(name, text), None, file, line)


def _warning(name: str, text: str) -> Warning:
    module, _, cls = name.rpartition(".")
    category = getattr(sys.modules.get(module), cls, None)
    if isinstance(category, type) and issubclass(category, Warning):
        with suppress(Exception):  # of a class that wants other arguments
            if str(found := category(text)) == text:
                return found
    return UserWarning(f"{cls}: {text}")
