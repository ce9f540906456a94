"""A stand-in for TorchRec's base of tests in ranks."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

from torch_testing_ext._testing.bases.spawned_functions import spawn

# Keeps these frames out of the tracebacks of unittest and of pytest.
__unittest = True
__tracebackhide__ = True


class MultiProcessTestBase(unittest.TestCase):
    """A base for tests, which pass a function and its keyword arguments to one of its methods."""

    def _run_multi_process_test(self, *, callable: Callable[..., object], world_size: int = 2, **kwargs: Any) -> None:
        """Call `callable(rank=, world_size=, **kwargs)` in each rank."""
        self._run_multi_process_test_per_rank(
            callable=callable, world_size=world_size, kwargs_per_rank=[kwargs] * world_size
        )

    def _run_multi_process_test_per_rank(
        self, *, callable: Callable[..., object], world_size: int, kwargs_per_rank: list[dict[str, Any]]
    ) -> None:
        """Do as `_run_multi_process_test`, with keyword arguments for each rank."""
        spawn(_call_by_keywords, world_size, callable, world_size, kwargs_per_rank)


def _call_by_keywords(
    rank: int, function: Callable[..., object], world_size: int, kwargs_per_rank: list[dict[str, Any]]
) -> None:
    kwargs = {**kwargs_per_rank[rank], "rank": rank, "world_size": world_size}
    function(**kwargs)
