"""The way of a test: in ranks, under layouts, or in a new interpreter, unless it is refused, or skipped in a world."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch_testing_ext._pytest_ranks import marks
from torch_testing_ext._pytest_ranks.pytest_internals.item_state import skip_at_test


def choose_way(item: Any, size: int | None) -> None:
    """Prepare a test, and let its call run it where its marks want it. `size`: of the world that the run simulates."""
    if item.get_closest_marker("layouts") is not None:
        from torch_testing_ext._pytest_ranks import layouts_of_tests

        layouts_of_tests.set_up(item)
        if size is not None:
            _skip_in_world(size, "compares values, which its ranks communicate")
        return
    if why := marks.read_marks(item):
        from torch_testing_ext._pytest_ranks import refusals

        refusals.note_refusal(item, why)
    of_standalone = item.stash.get(marks.STANDALONE, None)
    spec = item.stash.get(marks.SPEC, None)
    if of_standalone is not None and not hasattr(item.config.option, "dist_is_standalone"):
        from torch_testing_ext._pytest_ranks import standalone

        if size is not None:
            _skip_in_world(size, "runs in a new interpreter")
        standalone.set_up(item)
        item.runtest = functools.partial(standalone.run, item, of_standalone.timeout)
    elif spec is not None:
        from torch_testing_ext._pytest_ranks import item_in_parent

        spec_here = item_in_parent.set_up(item, spec)
        item.runtest = functools.partial(item_in_parent.run_in_ranks, item, spec_here)
    elif size is not None:
        _require_ranks(item)


def _skip_in_world(size: int, why: str) -> NoReturn:
    from torch_testing_ext._collectives.worlds.world_views import not_in_world

    raise skip_at_test(not_in_world(size, why))


def _require_ranks(item: Any) -> None:
    """Skip a test that cannot run in a whole world, since it has no ranks."""
    from torch_testing_ext._testing.bases import world_ranks
    from torch_testing_ext._testing.bases.ranked_test_case import RankedTestCase

    cls = getattr(item, "cls", None)
    if not (isinstance(cls, type) and issubclass(cls, RankedTestCase)):
        world_ranks.require_ranks(None, getattr(item, "function", None))
