"""The two roles in a property test across ranks: rank 0 leads, the others follow.

Both run the same body.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import StopTest

from torch_testing_ext._process.words import list_of
from torch_testing_ext._testing.bases.rank_accounts import refuse_what_ran_nothing
from torch_testing_ext.launch import Cause

from . import blueprints, hypothesis_internals
from .example_outcomes import (
    ExampleKind,
    ExampleOutcome,
    JudgedExample,
    PropertyResult,
    judge_example,
    line_of,
    outcome_of_error,
)
from .example_watchdog import Watchdog
from .groups_of_examples import Groups
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

# A rank that is still in an example this long after its waits were interrupted waits for something else.
INTERRUPT_TIMEOUT = 15.0
# The test's method, bound to its `self`; it gets the drawn values as keywords.
Body = functools.partial[None]


class PropertyFailure(AssertionError):
    """A property does not hold in some rank.

    All failures have this one type and are raised at one line, so Hypothesis takes them for a single bug. Otherwise the
    same bug, seen from two ranks, would count as two.
    """

    cause_of_failure = Cause.OF_ALL

    def __init__(self, message: str, judged: JudgedExample | None = None):
        super().__init__(message)
        self.judged = judged


class Abandoned(BaseException):
    """The ranks cannot continue together. Not an Exception, or Hypothesis would try to shrink it."""

    def __init__(self, message: str = "", example: str = ""):
        super().__init__(*([message] if message else []))
        self.example = example


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
        # The notes of the current example.
        self.notes: list[str] = []
        # The scores of the current example, by label.
        self.scores: dict[str, float] = {}
        # The current example, as a call of the test; "" between two.
        self.describe_current: Callable[[], str] = str

    def perform(self, body: Body, drawn: Mapping[str, Any]) -> ExampleOutcome:
        """Run the body on this rank's share of the drawn values."""
        self.notes, self.scores = [], {}
        self.describe_current = functools.partial(show_call, body, drawn)
        self.watchdog.enter(self.number, self.describe_current)
        try:
            arguments = {name: blueprints.for_rank(value, self.rank) for name, value in drawn.items()}
            refuse_what_ran_nothing(body(**arguments))
        except BaseException as error:
            # Torch's CheckpointException is no Exception.
            interrupted = self.watchdog.leave()
            if isinstance(error, _NOT_OF_THE_EXAMPLE):
                raise
            outcome = outcome_of_error(error, interrupted)
        else:
            self.watchdog.leave()
            outcome = ExampleOutcome(ExampleKind.PASSED)
        return replace(outcome, notes=tuple(self.notes), scores=self.scores)


class Leader(Participant):
    """Rank 0: runs inside Hypothesis, whose engine calls `run_example` for each example that it tries."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Replace the groups before the next example.
        self.needs_new_groups = True
        self.last: JudgedExample | None = None
        self.last_failed: JudgedExample | None = None
        # The example of `last_failed`, as a call of the test.
        self.failed_example = ""
        # The arguments of the latest example, before each rank takes its share.
        self.arguments: dict[str, Any] = {}
        # The ranks whose outcome of the current example is known.
        self.ended: dict[int, ExampleOutcome] = {}
        self.count = self.passed = 0

    def run_example(self, body: Body, drawn: dict[str, Any]) -> None:
        """Run one example in all ranks, and return or raise so that Hypothesis sees their combined outcome."""
        if self.needs_new_groups:
            self.recreate_groups()
        self.number += 1
        self.count += 1
        self.arguments = drawn
        self.watchdog.begin(self.number)
        self.describe_current = functools.partial(show_call, body, drawn)
        interactive = {name: value for name, value in drawn.items() if isinstance(value, st.DataObject)}
        self._send(_example(self.number, drawn, tuple(interactive), body))
        own = dict(drawn)
        for name, data in interactive.items():
            draw = functools.partial(self._draw_for_all, data)
            own[name] = blueprints.SharedData(draw, self.rank)
        self.ended = {}
        self.ended[0] = self._perform_own(body, own, bool(interactive))
        self._receive_from_all()
        self.watchdog.finish()
        outcomes = [self.ended[rank] for rank in range(self.world_size)]
        self._conclude_example(judge_example(outcomes))

    def _perform_own(self, body: Body, drawn: dict[str, Any], interactive: bool) -> ExampleOutcome:
        """Run the example in this rank. The others learn that it draws no more, and that it has left early."""
        try:
            outcome = self.perform(body, drawn)
        except StopTest:
            self.watchdog.report_left(self.number)
            self._send(NoMoreValues())
            self._receive_from_all()
            self.watchdog.finish()
            self.needs_new_groups = True
            raise
        if interactive:
            self._send(NoMoreValues())
        if outcome.ends_example:
            self.watchdog.report_left(self.number)
        return outcome

    def _conclude_example(self, judged: JudgedExample) -> None:
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
        self.last_failed, self.failed_example = judged, self.describe_current()
        raise PropertyFailure(judged.describe(), judged)

    def recreate_groups(self) -> None:
        """Replace the groups in all ranks: the last example may have left the old ones in any state."""
        self.describe_current = str
        self.groups.destroy()
        self._send(RecreateGroups())
        self.groups.create()
        # Otherwise this rank could end before the others have connected to it.
        self._receive_from_all()
        self.needs_new_groups = False

    def _draw_for_all(self, data: Any, strategy: Any, label: Any) -> Any:
        value = data.draw(strategy, label)
        self._send(DrawnValue(pickle.dumps(value)))
        return value

    def _send(self, message: MainMessage) -> None:
        for rank, link in self.links.items():
            link.send(message)
            # Raise at once: a wait in a collective takes long.
            if link.is_lost:
                self._raise_lost(rank)

    def _receive_from_all(self) -> None:
        """Receive one message from each rank in turn. If one is lost, the ranks before it are interrupted, so that they
        do not delay its discovery."""
        for rank in self.links:
            self._receive_from(rank)

    def _receive_from(self, rank: int) -> None:
        link = self.links[rank]
        while not link.has_message(INTERRUPT_TIMEOUT / 10):
            if self.watchdog.seconds_since_interrupt(self.number) > INTERRUPT_TIMEOUT:
                self._raise_stuck(rank)
        try:
            message = link.receive()
        except (EOFError, OSError):
            self._raise_lost(rank)
        if isinstance(message, ExampleEnds):
            self.ended[rank] = message.outcome

    def _raise_lost(self, rank: int) -> NoReturn:
        raise Abandoned(f"rank {rank} was lost {self._where()}", self.describe_current())

    def _where(self) -> str:
        example = self.describe_current()
        return f"in this example: {example}" if example else "between two examples"

    def _raise_stuck(self, first: int) -> NoReturn:
        others = {rank: link for rank, link in self.links.items() if rank >= first}
        stuck = [rank for rank, link in others.items() if not link.has_message(0)]
        for rank in others:
            if rank > first and rank not in stuck:
                self._receive_from(rank)
        failed = [rank for rank, outcome in self.ended.items() if outcome.kind is ExampleKind.FAILED]
        failure = f"rank {failed[0]} {line_of(self.ended[failed[0]])}; " if failed else ""
        raise Abandoned(
            f"{failure}{list_of(stuck)} could not be interrupted, as only waits on the network can be; "
            f"the other ranks left {INTERRUPT_TIMEOUT:.0f} s ago; nothing was shrunk {self._where()}",
            self.describe_current(),
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
                    if result.culprits and result.culprits[0] == 0:
                        # Rank 0 reports first.
                        self.links[0].wait_until_gone()
                    return result

    def _run_example(self, body: Body, example: RunExample) -> None:
        self.number = example.number
        self.watchdog.begin(self.number)
        drawn: dict[str, Any] = pickle.loads(example.drawn)
        shared = blueprints.SharedData(self._receive_draw, self.rank)
        drawn |= dict.fromkeys(example.interactive, shared)
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

    def _receive_draw(self, strategy: Any, label: Any) -> Any:
        message = self._receive()
        if isinstance(message, DrawnValue):
            return pickle.loads(message.value)
        raise blueprints.NoMoreDraws(
            "rank 0 makes no more draws in this example: it failed, or the ranks draw differently"
        )


def _example(number: int, drawn: Mapping[str, Any], interactive: tuple[str, ...], body: Body) -> RunExample:
    sent = {name: value for name, value in drawn.items() if name not in interactive}
    try:
        return RunExample(number, pickle.dumps(sent), interactive)
    except Exception as error:
        culprits = [name for name, value in sent.items() if not _can_be_pickled(value)]
        culprit = culprits[0] if culprits else "?"
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


def show_call(body: Body, drawn: Mapping[str, Any]) -> str:
    """Show the example as a call of the test."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in drawn.items())
    return f"{body.func.__name__}({arguments})"


__unittest = True
