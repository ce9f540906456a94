"""A property test in ranks: `given`, the leader, the followers, the whole run."""

from __future__ import annotations

import functools
import inspect
import pickle
import time
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import hypothesis
import torch.distributed as dist
from hypothesis import Phase, strategies as st
from hypothesis.errors import Flaky, StopTest, Unsatisfiable

from torch_testing_ext._process.words import list_of
from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase, ProcessRanksTestCase
from torch_testing_ext._testing.bases.rank_accounts import refuse_what_ran_nothing
from torch_testing_ext._testing.bases.ranked_test_case import RankedTestCase
from torch_testing_ext.launch import Cause

from . import examples, hypothesis_internals
from .examples import (
    ExampleKind,
    ExampleOutcome,
    JudgedExample,
    PropertyResult,
    for_rank,
    judge_example,
    line_of,
    outcome_of_error,
)
from .links import (
    Connections,
    DrawnValue,
    ExampleEnds,
    Groups,
    GroupsRecreated,
    Link,
    MainMessage,
    NoMoreValues,
    PeerLost,
    PeerLostElsewhere,
    PropertyEnds,
    RecreateGroups,
    RunExample,
    Watchdog,
    connect_ranks,
)

# --------------------------------------------------------------------------------------------------------------------
# The two roles in a property test across ranks: rank 0 leads, the others follow. Both run the same body.

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
            arguments = {name: examples.for_rank(value, self.rank) for name, value in drawn.items()}
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
        # Those of the latest example, before each rank takes its share.
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
            own[name] = examples.SharedData(draw, self.rank)
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
            # At once: to wait for it in a collective takes long.
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
        shared = examples.SharedData(self._receive_draw, self.rank)
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
        raise examples.NoMoreDraws(
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


# --------------------------------------------------------------------------------------------------------------------
# A whole property test in one rank: connect to the others, run the examples, report the result.

__unittest = True

_LONGEST_TITLE = 300
# A longer example, or one of several lines, comes after what happened.
_LONGEST_BEFORE_CAUSE = 200
# The parent must see the death of a rank before it sees the errors of the survivors, so that the verdict blames the
# dead rank.
_SURVIVOR_DELAY = 0.1


def run_property(test: Any, prop: Callable[..., None], body: Body) -> None:
    """Run a property in this rank. `prop` is the body after `hypothesis.given`."""
    examples = hypothesis_internals.replayed(prop, int(test.world_size))
    own_settings = hypothesis_internals.settings_of(prop)
    chosen = _settings_for_ranks(hypothesis_internals.settings_for(own_settings, examples))
    deadline = chosen.deadline.total_seconds() if isinstance(chosen.deadline, timedelta) else None
    with _participant(test, deadline) as participant:
        if isinstance(participant, Leader):
            hypothesis_internals.set_settings(prop, hypothesis.settings(chosen, deadline=None))
            hypothesis_internals.add_examples(prop, [arguments for _, arguments in examples or ()])
            _lead(participant, body, prop, examples)
        else:
            assert isinstance(participant, Follower)
            _follow(participant, body)


def _settings_for_ranks(chosen: hypothesis.settings) -> hypothesis.settings:
    """Adapt the test's settings to several ranks.

    The deadline limits a hang, and there is none unless the test sets one: Hypothesis' own deadline would compare times
    that only one rank knows. The explain phase traces the lines of only one process. Several bugs cannot be told apart,
    because every failure is a PropertyFailure.
    """
    default = hypothesis.settings.get_profile("default").deadline
    return hypothesis.settings(
        chosen,
        deadline=None if chosen.deadline == default else chosen.deadline,
        phases=[phase for phase in chosen.phases if phase is not Phase.explain],
        report_multiple_bugs=False,
        print_blob=True,
    )


@contextmanager
def _participant(test: Any, deadline: float | None) -> Iterator[Participant]:
    """Connect to the other ranks, and be `Participant.current` until the property ends."""
    rank, world_size = test.rank, int(test.world_size)
    links = connect_ranks(test.file_name, rank, world_size)
    connections = Connections()
    store_path = f"{test.file_name}.{_next_number(test)}"
    groups = Groups(rank, world_size, _backend(test), store_path, connections)
    peers = {other: link.watchdog for other, link in links.items()}
    watchdog = Watchdog(peers, rank == 0, connections, deadline)
    kind = Leader if rank == 0 else Follower
    participant = kind(rank, world_size, links, groups, watchdog)
    Participant.current = participant
    try:
        yield participant
    except BaseException:
        # Other ranks wait for the exit of this process before they exit.
        _open_until_exit.append(links)
        raise
    else:
        for link in links.values():
            link.close()
    finally:
        Participant.current = None
        watchdog.close()


_open_until_exit: list[Any] = []


def _next_number(test: Any) -> int:
    """Count the properties that a test runs: each has store files of its own."""
    number: int = vars(test).get("_properties_run", 0) + 1
    vars(test)["_properties_run"] = number
    return number


def _backend(test: Any) -> str:
    if dist.is_initialized():
        return dist.get_backend()
    chosen = getattr(test, "backend", None)
    return chosen if isinstance(chosen, str) else "gloo"


def _lead(
    leader: Leader, body: Body, prop: Callable[..., None], examples: Sequence[hypothesis_internals.Example] | None
) -> None:
    """Run the property as rank 0, send the result to the others, and end the test."""
    seed = hypothesis_internals.choose_seed(prop)
    lines: list[str] = []
    result = PropertyResult()
    try:
        with hypothesis_internals.capture_reports(lines), hypothesis_internals.examples_of_the_seed():
            prop(*body.args, **body.keywords)
        # Hypothesis refuses this of examples that it draws.
        if examples is not None and not leader.passed:
            raise Unsatisfiable(f"the property rejected all {leader.count} examples, so it tested nothing")
        if leader.needs_new_groups:
            # For the rest of the test.
            leader.recreate_groups()
    except PropertyFailure as failure:
        lines += getattr(failure, "__notes__", ())
        result = _failed(
            leader, failure, lines, seed, hypothesis_internals.reason_of_example(leader.arguments, examples)
        )
    except Flaky:
        if leader.last_failed is None:
            raise
        result = _flaky(leader, seed)
    except Abandoned as abandoned:
        result = _abandoned(leader, abandoned)
    finally:
        leader.finish(result)
    _conclude(leader, result)


def _abandoned(leader: Leader, abandoned: Abandoned) -> PropertyResult:
    if str(abandoned):
        return PropertyResult((0,), str(abandoned), lost=True, example=abandoned.example)
    assert leader.last is not None
    skips = {}
    for rank, outcome in enumerate(leader.last.outcomes):
        if outcome.kind is ExampleKind.SKIPPED:
            skips[rank] = outcome.summary
    return PropertyResult(skips=skips)


def _failed(
    leader: Leader, failure: PropertyFailure, lines: list[str], seed: int | None, phrase: str | None
) -> PropertyResult:
    """Report the smallest example.

    `lines`: the report of Hypothesis. `phrase`: what a replayed example is there for.
    """
    judged = failure.judged
    assert judged is not None
    # Versions of Hypothesis begin the line differently.
    is_explicit = any("explicit example" in line.partition(":")[0] for line in lines)
    origin = f"the smallest that Hypothesis found, in {leader.count} runs of the test"
    if is_explicit:
        origin = "one that every run has" if phrase is None else f"one that every run has: {phrase}"
    parts = [
        _title(_shortened(leader.failed_example), judged.headline()),
        _without_self(lines),
        f"In this example ({origin}):\n{judged.describe()}",
        judged.notes(),
        judged.tracebacks(),
        "" if is_explicit else _how_to_repeat(seed),
    ]
    return PropertyResult(judged.culprits, "\n\n".join(filter(None, parts)))


def _title(example: str, headline: str) -> str:
    """The example and what happened in it; a long example comes last."""
    if "\n" not in example and len(example) <= _LONGEST_BEFORE_CAUSE:
        return f"{example} {headline}"
    test, _, _ = example.partition("(")
    return f"{test} {headline}\nin the example: {example}"


def _without_self(texts: list[str]) -> str:
    """The report of Hypothesis, without the argument `self` of the test."""
    lines = "\n".join(texts).splitlines()
    return "\n".join(line for line in lines if not line.startswith("    self=<"))


def _flaky(leader: Leader, seed: int | None) -> PropertyResult:
    judged = leader.last_failed
    assert judged is not None
    title = (
        f"{_shortened(leader.failed_example)} failed, and then did not fail when it was run again: the test depends on "
        f"something other than the example, such as timing, or state that earlier examples left behind"
    )
    parts = [title, f"When it failed:\n{judged.describe()}", judged.tracebacks(), _how_to_repeat(seed)]
    return PropertyResult(judged.culprits, "\n\n".join(filter(None, parts)))


def _how_to_repeat(seed: int | None) -> str:
    if seed is None:
        return "To repeat these examples: run the test again. They are derived from the test itself (derandomize)."
    return f"To repeat these examples: put @hypothesis.seed({seed}) on the test."


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_TITLE:
        return text
    return f"{text[:_LONGEST_TITLE]}..."


def _follow(follower: Follower, body: Body) -> None:
    try:
        result = hypothesis_internals.run_in_example(functools.partial(follower.follow, body))
    except PeerLost:
        time.sleep(_SURVIVOR_DELAY)
        raise _peer_lost(follower) from None
    _conclude(follower, result)


def _peer_lost(follower: Follower) -> Exception:
    """Rank 1 reports the example. The other ranks raise an error that the verdict takes for a consequence."""
    if follower.rank == 1:
        example = follower.describe_current()
        return PeerLost(f"rank 0 was lost in this example: {example}", example)
    return PeerLostElsewhere("rank 0 was lost: connection closed by peer")


def _conclude(participant: Participant, result: PropertyResult) -> None:
    """End the test in this rank as the result demands: pass, skip or raise."""
    if result.lost:
        time.sleep(_SURVIVOR_DELAY)
        if participant.rank == 0:
            raise PeerLost(result.report, result.example) from None
        raise PeerLostElsewhere("a rank was lost: connection closed by peer") from None
    if participant.rank in result.skips:
        raise unittest.SkipTest(result.skips[participant.rank])
    if participant.rank not in result.culprits:
        return
    first = result.culprits[0]
    if participant.rank == first:
        raise PropertyFailure(result.report) from None
    raise PropertyFailure(f"failed in the example that rank {first} reports") from None


# --------------------------------------------------------------------------------------------------------------------
# `given`, `note` and `target` for tests that run in several ranks.


def given(*positional: Any, **named: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: `hypothesis.given`, also for tests that run in ranks, which all get the same examples.

    @given(tensor=tensors(), op=sampled_from(["sum", "max"]))
    def test_reduce(self, tensor, op): ...
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        """Make the test, whose examples run in all ranks if it runs in one."""

        @functools.wraps(body)
        def run_example(*args: Any, **arguments: Any) -> Any:
            """Run one example. Hypothesis may pass `self` as a keyword, too, and refuses results."""
            drawn = {name: arguments.pop(name) for name in list(arguments) if name not in not_drawn}
            bound = functools.partial(body, *args, **arguments)
            if isinstance(Participant.current, Leader):
                return Participant.current.run_example(bound, drawn)
            values = {name: for_rank(value, 0) for name, value in drawn.items()}
            return bound(**values)

        original: Any = hypothesis.given(*positional, **named)
        prop: Callable[..., None] = original(run_example)
        not_drawn = inspect.signature(prop).parameters

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
            prop(*args, **kwargs)

        return test

    return decorate


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
