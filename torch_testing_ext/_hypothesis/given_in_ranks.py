"""`given`, `note` and `target` for tests that run in several ranks."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis

from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase
from torch_testing_ext._testing.bases.process_ranks_test_case import ProcessRanksTestCase
from torch_testing_ext._testing.bases.ranked_test_case import RankedTestCase
from torch_testing_ext.launch.rank_context import context_here

from . import hypothesis_internals
from .blueprints import for_rank
from .property_roles import Leader, Participant
from .property_run import run_property

__unittest = True


def given(*positional: Any, **named: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: `hypothesis.given`, also for tests that run in ranks, which all get the same examples.

    @given(tensor=tensors(), op=sampled_from(["sum", "max"]))
    def test_reduce(self, tensor, op): ...
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        """Make the test, whose examples run in all ranks if it runs in one."""
        original: Any = hypothesis.given(*positional, **named)
        return in_ranks(original(body))

    return decorate


def for_all_ranks(test: Callable[..., Any]) -> Callable[..., Any]:
    """Give all ranks the same examples of a test by Hypothesis's own `given`, also below other decorators."""
    if hasattr(test, hypothesis_internals.IN_RANKS):
        return test
    inner: Any = getattr(test, "__wrapped__", None)
    if not getattr(inner, "is_hypothesis_test", False):
        return in_ranks(test)
    # All ranks run what a decorator does around the examples, so these are shared inside of it.
    cells = [cell for cell in test.__closure__ or () if cell.cell_contents is inner]
    for cell in cells:
        cell.cell_contents = for_all_ranks(inner)
    shared = test if cells else _refused(test)
    setattr(shared, hypothesis_internals.IN_RANKS, True)
    return shared


def _refused(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test that fails, and nothing else: its examples cannot be shared."""

    @functools.wraps(test)
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TypeError(
            f"a decorator of {test.__name__} hides its @given, so each rank would draw examples of its own: "
            f"import `given` from torch_testing_ext.hypothesis_utils"
        )

    return refuse


@functools.cache
def in_ranks(prop: Any) -> Callable[..., None]:
    """Make the test of a property by `hypothesis.given`: its examples run in all ranks if it runs in one."""
    body = prop.hypothesis.inner_test
    not_drawn = inspect.signature(prop).parameters

    @functools.wraps(body)
    def run_example(*args: Any, **arguments: Any) -> Any:
        """Run one example. Hypothesis may pass `self` as a keyword, too, and refuses results."""
        drawn = {name: arguments.pop(name) for name in list(arguments) if name not in not_drawn}
        bound = functools.partial(body, *args, **arguments)
        if isinstance(Participant.current, Leader):
            return Participant.current.run_example(bound, drawn)
        values = {name: for_rank(value, 0) for name, value in drawn.items()}
        return bound(**values)

    prop.hypothesis.inner_test = run_example

    @functools.wraps(prop)
    def test(*args: Any, **kwargs: Any) -> None:
        hypothesis_internals.copy_decorations(test, prop)
        case = args[0] if args else None
        if _is_rank(case):
            run_property(case, prop, functools.partial(body, *args, **kwargs))
            return
        if isinstance(case, RankedTestCase) and not isinstance(case, MultiProcessTestCase):
            raise TypeError(
                f"@given runs in ranks of MultiProcessTestCase and its subclasses only: those of "
                f"{_base_of(case)} would each draw examples of their own"
            )
        rank = None if isinstance(case, RankedTestCase) else _this_rank()
        if rank is not None:
            run_property(rank, prop, functools.partial(body, *args, **kwargs))
            return
        prop(*args, **kwargs)

    setattr(test, hypothesis_internals.IN_RANKS, True)
    return test


@dataclass
class _RankOfFunction:
    """A rank of a test without a class of ours, as a property needs it."""

    rank: int
    world_size: int
    # The beginning of the names of files through which the ranks meet.
    file_name: str


# Numbers for the properties that this process runs: all ranks count alike.
_numbers = itertools.count()


def _this_rank() -> _RankOfFunction | None:
    """The rank that this process is; None if it is none."""
    context = context_here()
    if context is None:
        return None
    name = str(context.directory / f"property{next(_numbers)}")
    return _RankOfFunction(context.rank, context.world_size, name)


def _base_of(case: RankedTestCase) -> str:
    """The name of our class of test cases with ranks that a test case extends."""
    common = {RankedTestCase, ProcessRanksTestCase}
    bases = [cls for cls in type(case).__mro__ if common.intersection(cls.__bases__)]
    return bases[0].__name__


def _is_rank(test: Any) -> bool:
    return isinstance(test, MultiProcessTestCase) and test.rank != test.MAIN_PROCESS_RANK


def note(value: object) -> None:
    """Print a value with this example if it is reported. Equal notes of several ranks are printed once."""
    if Participant.current is None:
        hypothesis.note(value)
    else:
        Participant.current.notes.append(str(value))


def target(observation: float, label: str = "") -> float:
    """Make Hypothesis look for examples in which `observation` is large on some rank."""
    if Participant.current is None:
        return hypothesis.target(observation, label=label)
    scores = Participant.current.scores
    if label in scores:
        raise ValueError(f"target() was called twice in an example for the label {label!r}")
    scores[label] = float(observation)
    return observation
