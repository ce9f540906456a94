"""Warnings of ranks: recorded in the rank, and raised once more in the process of the test."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress

from torch_testing_ext.launch.accounts import OwnWarning, RankAccount


def warn_again(accounts: Iterable[RankAccount | None]) -> None:
    """Raise each different warning in the accounts of some ranks once."""
    of_ranks: list[OwnWarning] = []
    for account in accounts:
        if account is not None:
            of_ranks += account.warnings
    raise_again(of_ranks)


def raise_again(packed: Iterable[OwnWarning], filtered: bool = False) -> None:
    """Raise each different warning once.

    The filters of the process that recorded it have let it pass. `filtered`: it may have others than this process has.
    """
    with warnings.catch_warnings():
        if not filtered:
            warnings.simplefilter("always")
        different = dict.fromkeys(OwnWarning(*warning) for warning in packed)
        for text, name, file, line in different:
            warnings.warn_explicit(_warning(name, text), None, file, line)


def _warning(name: str, text: str) -> Warning:
    module, _, cls = name.rpartition(".")
    category = getattr(sys.modules.get(module), cls, None)
    if isinstance(category, type) and issubclass(category, Warning):
        # The class may want other arguments.
        with suppress(Exception):
            warning = category(text)
            if str(warning) == text:
                return warning
    return UserWarning(f"{cls}: {text}")
