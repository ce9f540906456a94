"""The fork server of a test, forked before its setUp: ranks get the state that this process has then, not later.

New processes lack what setUp leaves in the parent, so ranks must lack it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_testing_ext import launch

from .expected_imports import expected_imports
from .ranked import RankedTestCase


def fork_server_for(test: RankedTestCase, body: Callable[..., Any]) -> None:
    """Fork the server for the ranks of a test, which run `body`, unless the test will start none."""
    if launch.this_launch() is None and not test._is_rank() and not _skips_without_set_up(test):
        subject = launch.Named.of(type(test))
        launch.prepare(launch.Named.of(body), subject, expected_imports(subject.file or ""))


def _skips_without_set_up(test: RankedTestCase) -> bool:
    method = getattr(test, test._testMethodName, None)
    if any(getattr(one, "__unittest_skip__", False) for one in (type(test), method)):
        return True
    try:
        return test._known_skip() is not None
    except AttributeError:
        return True  # a need that reads what setUp has yet to set: it may skip
    except Exception:
        return False  # raised again, and then shown, when setUp starts the ranks
