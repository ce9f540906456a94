"""The two roles in a property test across ranks: rank 0 leads, the others follow. Both run the same body."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import StopTest

from . import example_values, hypothesis_internals
from .groups import Groups
from .links import (
    DrawnValue,
    ExampleEnds,
    GroupsRecreated,
    Link,
    MainMessage,
    NoMoreValues,
    PeerLost,
    PropertyEnds,
    RecreateGroups,
    RunExample,
)
from .outcome import (
    ExampleKind,
    ExampleOutcome,
    JudgedExample,
    PropertyResult,
    judge_example,
    name_ranks,
    outcome_of_error,
)
from .watchdog import Watchdog

__rank_frame__ = True

# A rank that is still in an example this long after its waits were interrupted waits for something else.
INTERRUPT_TIMEOUT = 15.0

# The test's method, bound to its `self`; it gets the drawn values as keywords.
Body = functools.partial[None]


class PropertyFailure(AssertionError):
    """A property does not hold in some rank.

    All failures have this one type and are raised at one line, so Hypothesis takes them for a single bug. Otherwise the
    same bug, seen from two ranks, would count as two.
    """

    def __init__(self, message: str, judged: JudgedExample | None = None):
        super().__init__(message)
        self.judged = judged


class Abandoned(BaseException):
    """The ranks cannot continue together. Not an Exception, or Hypothesis would try to shrink it."""


class Observations:
    """The notes and scores that the body of a test records with `note` and `target` during one example."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.scores: dict[str, float] = {}


# Hypothesis' own, when an example has used up its budget of draws; ours, when a rank is lost; and requests to stop.
_NOT_OF_THE_EXAMPLE = (StopTest, Abandoned, KeyboardInterrupt, SystemExit, GeneratorExit)


class Participant:
    """One rank in a property test. `Participant.current` is this process's own, until the property ends."""

    current: Participant | None = None

    def __init__(self, rank: int, world_size: int, links: Mapping[int, Link], groups: Groups, watchdog: Watchdog):
        self.rank = rank
        self.world_size = world_size
        self.links = links
        self.groups = groups
        self.watchdog = watchdog
        self.number = 0
        self.observations = Observations()
        self.describe_current: Callable[[], str] = str  # the current example, as a call of the test

    def perform(self, body: Body, drawn: Mapping[str, Any]) -> ExampleOutcome:
        """Run the body on this rank's share of the drawn values."""
        self.observations = observations = Observations()
        self.describe_current = functools.partial(describe, body, drawn)
        self.watchdog.enter(self.number, self.describe_current)
        try:
            body(**{name: example_values.for_rank(value, self.rank) for name, value in drawn.items()})
        except BaseException as error:  # torch's CheckpointException is no Exception
            interrupted = self.watchdog.leave()
            if isinstance(error, _NOT_OF_THE_EXAMPLE):
                raise
            outcome = outcome_of_error(error, interrupted)
        else:
            self.watchdog.leave()
            outcome = ExampleOutcome(ExampleKind.PASSED)
        return replace(outcome, notes=tuple(observations.notes), scores=observations.scores)


class Leader(Participant):
    """Rank 0: runs inside Hypothesis, whose engine calls `run_example` for each example that it tries."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.needs_new_groups = True  # before the next example
        self.last: JudgedExample | None = None
        self.last_failed: JudgedExample | None = None
        self.failed_example = ""  # the example of `last_failed`, as a call of the test
        self.arguments: dict[str, Any] = {}  # those of the latest example, before each rank takes its share
        self.count = self.passed = 0

    def run_example(self, body: Body, drawn: dict[str, Any]) -> None:
        """Run one example in all ranks, and return or raise so that Hypothesis sees their combined outcome."""
        if self.needs_new_groups:
            self.recreate_groups()
        self.number += 1
        self.count += 1
        self.arguments = drawn
        self.watchdog.begin(self.number)
        describe_it = functools.partial(describe, body, drawn)
        interactive = {name: value for name, value in drawn.items() if isinstance(value, st.DataObject)}
        self._send(_example(self.number, drawn, tuple(interactive), body), describe_it)
        mine = {
            **drawn,
            **{name: example_values.LeadersData(value, self._send_draw) for name, value in interactive.items()},
        }
        outcome = self._perform_mine(body, mine, bool(interactive))
        judged = judge_example([outcome, *self._outcomes(describe_it)])
        self.watchdog.finish()
        self._conclude_example(judged, describe_it)

    def _perform_mine(self, body: Body, drawn: dict[str, Any], interactive: bool) -> ExampleOutcome:
        try:
            outcome = self.perform(body, drawn)
        except StopTest:
            self.watchdog.report_left(self.number)
            self._send(NoMoreValues())
            self._receive_from_all(self.describe_current)
            self.watchdog.finish()
            self.needs_new_groups = True
            raise
        if interactive:
            self._send(NoMoreValues())
        if outcome.ends_example:
            self.watchdog.report_left(self.number)
        return outcome

    def _conclude_example(self, judged: JudgedExample, describe_it: Callable[[], str]) -> None:
        self.last = judged
        self.needs_new_groups = judged.is_damaging or self.watchdog.interrupted == self.number
        if judged.kind is ExampleKind.PASSED:
            self.passed += 1
            for label, score in judged.scores().items():
                hypothesis.target(score, label=label)
            return
        if judged.kind is ExampleKind.REJECTED:
            hypothesis.reject()
        if judged.kind is ExampleKind.SKIPPED:
            raise Abandoned
        self.last_failed, self.failed_example = judged, describe_it()
        _fail(judged)

    def recreate_groups(self) -> None:
        """Replace the groups in all ranks: the last example may have left the old ones in any state."""
        self.groups.destroy()
        self._send(RecreateGroups())
        self.groups.create()
        self._receive_from_all(str)  # otherwise this rank could end before the others have connected to it
        self.needs_new_groups = False

    def _send_draw(self, value: Any) -> None:
        self._send(DrawnValue(pickle.dumps(value)))

    def _send(self, message: MainMessage, describe_it: Callable[[], str] = str) -> None:
        for rank, link in self.links.items():
            link.send(message)
            if link.is_lost:  # at once: to wait for it in a collective takes long
                self._raise_lost(rank, describe_it)

    def _outcomes(self, describe_it: Callable[[], str]) -> list[ExampleOutcome]:
        return [one.outcome for one in self._receive_from_all(describe_it) if isinstance(one, ExampleEnds)]

    def _receive_from_all(self, describe_it: Callable[[], str]) -> list[MainMessage]:
        """Receive one message from each rank in turn. If one is lost, the ranks before it are interrupted, so that they
        do not delay its discovery."""
        return [self._receive_from(rank, describe_it) for rank in self.links]

    def _receive_from(self, rank: int, describe_it: Callable[[], str]) -> MainMessage:
        link = self.links[rank]
        while not link.has_message(INTERRUPT_TIMEOUT / 10):
            if self.watchdog.seconds_since_interrupt(self.number) > INTERRUPT_TIMEOUT:
                self._raise_stuck(rank, describe_it)
        try:
            return link.receive()
        except (EOFError, OSError):
            self._raise_lost(rank, describe_it)

    def _raise_lost(self, rank: int, describe_it: Callable[[], str]) -> NoReturn:
        raise Abandoned(f"rank {rank} was lost {self._where(describe_it())}")

    def _where(self, example: str) -> str:
        return f"in this example: {example}" if example else "between two examples"

    def _raise_stuck(self, first: int, describe_it: Callable[[], str]) -> NoReturn:
        stuck = [rank for rank, link in self.links.items() if rank >= first and not link.has_message(0)]
        raise Abandoned(
            f"{name_ranks(stuck)} could not be interrupted, as only waits on the network can be; the other ranks left "
            f"{INTERRUPT_TIMEOUT:.0f} s ago; nothing was shrunk {self._where(describe_it())}"
        )

    def finish(self, result: PropertyResult) -> None:
        """Send the result to the others: first to the rank that reports a failure, and to the rest when it has exited.

        The verdict starts with the culprit that exits first.
        """
        first = result.culprits[0] if result.culprits else 0
        for rank in sorted(self.links, key=lambda rank: rank != first):
            self.links[rank].send(PropertyEnds(result))
            if rank == first:
                self.links[rank].wait_until_gone()


class Follower(Participant):
    """Any other rank: runs the examples that rank 0 sends until the property ends."""

    def follow(self, body: Body) -> PropertyResult:
        """Run examples until rank 0 sends the result, and return it."""
        while True:
            match self._receive():
                case RunExample() as example:
                    self._run_example(body, example)
                case RecreateGroups():
                    self.groups.destroy()
                    self.groups.create()
                    self.links[0].send(GroupsRecreated())
                case PropertyEnds(result):
                    return self._await_turn(result)

    def _await_turn(self, result: PropertyResult) -> PropertyResult:
        if result.culprits and result.culprits[0] == 0:
            self.links[0].wait_until_gone()  # rank 0 reports first
        return result

    def _run_example(self, body: Body, example: RunExample) -> None:
        self.number = example.number
        self.watchdog.begin(self.number)
        drawn: dict[str, Any] = pickle.loads(example.drawn)
        drawn.update(
            {name: example_values.FollowersData(self._receive_draw, self.rank) for name in example.interactive}
        )
        with hypothesis_internals.next_example():
            outcome = self.perform(body, drawn)
        if outcome.ends_example:
            self.watchdog.report_left(self.number)
        self.links[0].send(ExampleEnds(outcome))

    def _receive(self) -> MainMessage:
        try:
            return self.links[0].receive()
        except (EOFError, OSError):
            raise PeerLost("rank 0 was lost") from None

    def _receive_draw(self) -> Any:
        message = self._receive()
        if isinstance(message, DrawnValue):
            return pickle.loads(message.value)
        raise example_values.NoMoreDraws(
            "rank 0 makes no more draws in this example: it failed, or the ranks draw differently"
        )


def _fail(judged: JudgedExample) -> NoReturn:
    raise PropertyFailure(judged.describe(), judged)


def _example(number: int, drawn: Mapping[str, Any], interactive: tuple[str, ...], body: Body) -> RunExample:
    sent = {name: value for name, value in drawn.items() if name not in interactive}
    try:
        return RunExample(number, pickle.dumps(sent), interactive)
    except Exception as error:
        culprit = next((name for name, value in sent.items() if not _can_be_pickled(value)), "?")
        raise Abandoned(
            f"{body.func.__name__}: the argument {culprit!r} cannot be sent to the other ranks ({error}): draw "
            f"something that can be pickled, and build the rest of it in the test"
        ) from None


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def describe(body: Body, drawn: Mapping[str, Any]) -> str:
    """Show the example as a call of the test."""
    return f"{body.func.__name__}({', '.join(f'{name}={value!r}' for name, value in drawn.items())})"
