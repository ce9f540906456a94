"""Facts about a test: its name, whether it is of unittest, its exceptions, skips and expected failures."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.skipping import evaluate_xfail_marks, xfailed_key
from _pytest.unittest import UnitTestCase


def name_in_file(node: Any) -> str:
    """The name of a test or class in its file, as in `TestA::test_x[1]`: the path may have `::`, too."""
    file = node.getparent(pytest.File)
    if file is None:
        return str(node.nodeid.partition("::")[2])
    return str(node.nodeid.removeprefix(f"{file.nodeid}::"))


def is_of_unittest(item: Any) -> bool:
    """Whether a test is a method of a unittest.TestCase."""
    return isinstance(item.parent, UnitTestCase)


def kept_errors(item: Any) -> list[BaseException]:
    """The exceptions of a test of unittest, which pytest keeps instead of raising them."""
    return [excinfo.value for excinfo in getattr(item, "_excinfo", None) or ()]


def postponed_tear_down(item: Any) -> Any:
    """The `tearDown` of a test of unittest that --pdb postpones; None without one."""
    return getattr(item, "_explicit_tearDown", None)


def skip_at_test(reason: str) -> Any:
    """A skip that is reported with the line of the test, and not with the line that raises it."""
    return pytest.skip.Exception(reason, _use_item_location=True)


def is_marked_xfail(item: Any) -> bool:
    """Whether pytest has found that a test is expected to fail, by a mark that holds."""
    return item.stash.get(xfailed_key, None) is not None


def read_xfail_marks(item: Any) -> None:
    """Let pytest take notice of marks that a test has added while it ran."""
    item.stash[xfailed_key] = evaluate_xfail_marks(item)
