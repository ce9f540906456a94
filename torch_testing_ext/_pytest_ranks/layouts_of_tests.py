"""The mark `layouts`: a test for each layout, which is called in the ranks of that and of the reference."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from torch_testing_ext._pytest_ranks.item_in_parent import case_of_item
from torch_testing_ext._pytest_ranks.marks import NAME as WORLD_SIZE
from torch_testing_ext._pytest_ranks.pytest_internals.item_fixtures import argument_names
from torch_testing_ext._pytest_ranks.pytest_internals.item_state import is_of_unittest
from torch_testing_ext._pytest_ranks.refusals import note_refusal
from torch_testing_ext.layouts.layout_checks import LayoutCheck, raise_unless_right
from torch_testing_ext.layouts.layout_options import LayoutOptions, checked_options
from torch_testing_ext.layouts.layout_text import parse_axes, parse_steps

# Keeps these frames out of pytest's tracebacks.
__tracebackhide__ = True

NAME = "layouts"
# The parameter by which the mark becomes several tests.
PARAMETER = "_layout_of_mark"
_FIXTURE = "layout"

# The check of the latest test function, whose other layouts follow, with what tells it from others.
_LATEST: pytest.StashKey[tuple[object, LayoutCheck]] = pytest.StashKey()


def expand_layouts(metafunc: pytest.Metafunc) -> None:
    """Make one test for each layout; its id is the text. A mark that is wrong is refused later."""
    mark = metafunc.definition.get_closest_marker(NAME)
    if mark is not None and mark.args:
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(PARAMETER, mark.args, ids=[str(text) for text in mark.args])


def most_ranks_of(item: Any) -> int:
    """The ranks that a test with the mark has at most; 1 for others, and if the mark is wrong."""
    text = _text_of(item)
    try:
        return max(math.prod(parse_axes(part).values()) for part in parse_steps(text)) if text is not None else 1
    except ValueError:
        return 1


def set_up(item: Any) -> None:
    """Let the call of a marked test compare its layout. Raises a refusal if the mark is wrong."""
    try:
        options = _options_of(item)
    except (TypeError, ValueError) as error:
        note_refusal(item, f"@pytest.mark.{NAME}: {error}")
    item.runtest = functools.partial(_run, item, options)


def _options_of(item: Any) -> LayoutOptions:
    """The options of the mark. Raises TypeError or ValueError."""
    mark = item.get_closest_marker(NAME)
    if not isinstance(item, pytest.Function) or is_of_unittest(item):
        raise ValueError("a test of unittest has the decorator instead: torch_testing_ext.layouts.layouts")
    if item.get_closest_marker(WORLD_SIZE) is not None:
        raise ValueError(f"the test has the mark {WORLD_SIZE}, too, and its layouts say how many ranks it has")
    if len(list(item.iter_markers(NAME))) > 1:
        raise ValueError("the test has this mark twice: give all layouts to one")
    options = checked_options(mark.args, mark.kwargs)
    if _text_of(item) is None:
        raise ValueError("it was added after the test was collected, which is too late")
    if _FIXTURE not in argument_names(item):
        raise ValueError(f"the test has no argument {_FIXTURE}, which only a test can have, and no fixture")
    return options


def _text_of(item: Any) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(PARAMETER)


def _run(item: Any, options: LayoutOptions) -> None:
    __tracebackhide__ = True
    text = _text_of(item)
    assert text is not None
    arguments = {name: item.funcargs[name] for name in argument_names(item)}

    def train(layout: Any) -> object:
        return item.obj(**{**arguments, _FIXTURE: layout})

    case = case_of_item(item)
    report = _check_of(item, options).report(train, text, case)
    item.user_properties.append((NAME, report.data()))
    raise_unless_right([report], case, options.reference)


def _check_of(item: Any, options: LayoutOptions) -> LayoutCheck:
    """The check of the test's function, and of its other parameters: the reference is run once."""
    others = {name: repr(value) for name, value in item.callspec.params.items() if name != PARAMETER}
    key = (item.parent.nodeid, item.originalname, tuple(sorted(others.items())))
    latest = item.session.stash.get(_LATEST, None)
    if latest is not None and latest[0] == key:
        known: LayoutCheck = latest[1]
        return known
    if latest is not None:
        latest[1].close()
    check = LayoutCheck(item.get_closest_marker(NAME).args, options)
    item.session.stash[_LATEST] = key, check
    item.config.add_cleanup(check.close)
    return check
