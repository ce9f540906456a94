"""A plugin for pytest that takes Lightning's `RunIf(standalone=True)` for the mark `standalone`.

    pytest -p torch_testing_ext.compat.lightning

`RunIf` makes a skipif with that keyword, which skips unless PL_RUN_STANDALONE_TESTS is 1.
"""

import os

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    if os.environ.get("PL_RUN_STANDALONE_TESTS") != "1":
        return
    if any(mark.kwargs.get("standalone") for mark in item.iter_markers("skipif")):
        item.add_marker(pytest.mark.standalone)
