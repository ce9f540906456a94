"""A pytest plugin that runs test files written for torch.testing._internal on our classes, and knows our profile.

    python -m pytest -p torch_testing_ext.pytest_plugin --torch-drop-in test/distributed/test_store.py

    python -m pytest -p torch_testing_ext.pytest_plugin --hypothesis-profile=search test/distributed

With -v, pytest lists the names that came from PyTorch after collection.
"""

from __future__ import annotations

from typing import Any

import pytest

from torch_testing_ext._cases import invocation
from torch_testing_ext.upstream import drop_in

OPTION = "--torch-drop-in"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch_testing_ext")
    group.addoption(OPTION, action="store_true", help="run PyTorch test files on the classes of torch_testing_ext")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Install before any conftest imports something."""
    if early_config.known_args_namespace.torch_drop_in:
        _install()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Install in an xdist worker too, which gets its plugins later. Register our profile before Hypothesis wants it."""
    if config.getoption("--hypothesis-profile", None) == "search":
        from torch_testing_ext._hypothesis import search

        search.register()
        search.choose(search.NAME)
    if config.getoption(OPTION):
        _install()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    shown = config.getoption(OPTION) and config.get_verbosity() > 0
    return drop_in.explain().splitlines() if shown else []


def _install() -> None:
    drop_in.install()
    invocation.pytest_arguments = ["-p", __name__, OPTION]
