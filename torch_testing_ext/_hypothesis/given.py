"""`given`, `note` and `target` for tests that run in several ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import hypothesis

from torch_testing_ext._cases.multi_process import MultiProcessTestCase

from . import internals
from .ranks import Leader, Rank
from .run import run
from .values import for_rank

__unittest = True
__rank_frame__ = True


def given(*positional: Any, **named: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`hypothesis.given`, for a test that runs in ranks. Elsewhere it is `hypothesis.given`."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def one_example(*args: Any, **arguments: Any) -> None:
            """As Hypothesis calls it: `self` may be among the keywords."""
            drawn = {name: arguments.pop(name) for name in list(arguments) if name not in not_drawn}
            if isinstance(Rank.current, Leader):
                Rank.current.example(functools.partial(body, *args, **arguments), drawn)
            else:
                body(*args, **arguments, **{name: for_rank(value, 0) for name, value in drawn.items()})

        prop = hypothesis.given(*positional, **named)(one_example)
        not_drawn = inspect.signature(prop).parameters

        @functools.wraps(prop)
        def test(*args: Any, **kwargs: Any) -> None:
            internals.adopt_decorations(test, prop)
            if args and _is_rank(args[0]):
                run(args[0], prop, functools.partial(body, args[0]))
            else:
                prop(*args, **kwargs)

        return test

    return decorate


def _is_rank(test: Any) -> bool:
    return isinstance(test, MultiProcessTestCase) and test.rank != test.MAIN_PROCESS_RANK


def note(value: object) -> None:
    """Have this said of the example, if it is the one that is reported. Ranks that say the same are told of once."""
    if Rank.current is None:
        hypothesis.note(value)
    else:
        Rank.current.journal.notes.append(str(value))


def target(observation: float, label: str = "") -> float:
    """Have Hypothesis look for examples in which this is large in some rank."""
    if Rank.current is None:
        return hypothesis.target(observation, label=label)
    scores = Rank.current.journal.scores
    if label in scores:
        raise ValueError(f"target() was called twice in an example for the label {label!r}")
    scores[label] = float(observation)
    return observation
