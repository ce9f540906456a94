"""`given`, `note` and `target` for tests that run in several ranks."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import hypothesis

from torch_testing_ext._cases.multi_process import MultiProcessTestCase
from torch_testing_ext._cases.process_case import ProcessRanksTestCase
from torch_testing_ext._cases.ranked import RankedTestCase

from . import hypothesis_internals
from .example_values import for_rank
from .participants import Leader, Participant
from .property_run import run

__unittest = True


def given(*positional: Any, **named: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Extend `hypothesis.given` to tests that run in ranks. For other tests, it is `hypothesis.given`."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def one_example(*args: Any, **arguments: Any) -> Any:
            """Run one example. Hypothesis may pass `self` as a keyword, too, and refuses results."""
            drawn = {name: arguments.pop(name) for name in list(arguments) if name not in not_drawn}
            if isinstance(Participant.current, Leader):
                return Participant.current.run_example(functools.partial(body, *args, **arguments), drawn)
            return body(*args, **arguments, **{name: for_rank(value, 0) for name, value in drawn.items()})

        original: Any = hypothesis.given(*positional, **named)
        prop: Callable[..., None] = original(one_example)
        not_drawn = inspect.signature(prop).parameters

        @functools.wraps(prop)
        def test(*args: Any, **kwargs: Any) -> None:
            hypothesis_internals.copy_decorations(test, prop)
            if args and _is_rank(args[0]):
                run(args[0], prop, functools.partial(body, *args, **kwargs))
            elif args and isinstance(args[0], RankedTestCase) and not isinstance(args[0], MultiProcessTestCase):
                common = {RankedTestCase, ProcessRanksTestCase}
                base = next(cls.__name__ for cls in type(args[0]).__mro__ if common.intersection(cls.__bases__))
                raise TypeError(
                    f"@given runs in ranks of MultiProcessTestCase and its subclasses only: those of "
                    f"{base} would each draw examples of their own"
                )
            else:
                prop(*args, **kwargs)

        return test

    return decorate


def _is_rank(test: Any) -> bool:
    return isinstance(test, MultiProcessTestCase) and test.rank != test.MAIN_PROCESS_RANK


def note(value: object) -> None:
    """Add a line to the report of this example, if it is the one that is reported. Equal notes of ranks are merged."""
    if Participant.current is None:
        hypothesis.note(value)
    else:
        Participant.current.notes.append(str(value))


def target(observation: float, label: str = "") -> float:
    """Have Hypothesis search for examples in which the observation of some rank is large."""
    if Participant.current is None:
        return hypothesis.target(observation, label=label)
    scores = Participant.current.scores
    if label in scores:
        raise ValueError(f"target() was called twice in an example for the label {label!r}")
    scores[label] = float(observation)
    return observation
