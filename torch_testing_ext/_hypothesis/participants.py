"""The two parts in a property test across ranks: rank 0 leads, the others follow. Both run the same body."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import StopTest

from . import internals, values
from .groups import Groups
from .links import Link, PeerLost
from .outcome import ExampleKind, ExampleOutcome, JudgedExample, judge_example, of_error
from .watchdog import Watchdog

__rank_frame__ = True

# A rank that has not come out of an example so long after its waits were broken off waits for something else.
PATIENCE = 15.0

# What rank 0 says.
EXAMPLE, DRAWN, NO_MORE, REMAKE, END = "example", "drawn", "no more draws", "remake", "end"

# The test's method, with its `self`; what is drawn comes as keywords.
Body = functools.partial[None]


class PropertyFailure(AssertionError):
    """A property does not hold in some rank. One type, raised at one line: to Hypothesis all such failures are one,
    and so it never mistakes one rank's account of a failure for another bug than another rank's."""

    def __init__(self, message: str, settled: JudgedExample | None = None):
        super().__init__(message)
        self.settled = settled


class Abandoned(BaseException):
    """The ranks cannot go on together. Not an Exception, or Hypothesis would try to shrink it."""


@dataclass(frozen=True)
class PropertyEnd:
    """How the whole property ended, as rank 0 tells it to the others."""

    culprits: tuple[int, ...] = ()  # ranks that failed in the smallest example, the one that reports it first
    report: str = ""
    skips: Mapping[int, str] = field(default_factory=dict)  # why, of the ranks that skipped
    lost: bool = False  # a rank is gone or stuck, and the report says which


class Journal:
    """What a body tells beside its outcome: `note` and `target`."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.scores: dict[str, float] = {}


class Rank:
    """One rank's part. While an example runs, `Rank.current` is it."""

    current: Rank | None = None

    def __init__(self, rank: int, world_size: int, links: Mapping[int, Link], groups: Groups, watch: Watchdog):
        self.rank = rank
        self.world_size = world_size
        self.links = links
        self.groups = groups
        self.watch = watch
        self.number = 0
        self.journal = Journal()
        self.present: Callable[[], str] = str  # the example, as a call of the test

    def perform(self, body: Body, drawn: Mapping[str, Any]) -> ExampleOutcome:
        """Run the body on this rank's share of what was drawn."""
        self.journal = journal = Journal()
        self.present = functools.partial(describe, body, drawn)
        self.watch.enter(self.number, self.present)
        try:
            body(**{name: values.for_rank(value, self.rank) for name, value in drawn.items()})
        except (Exception, StopTest) as error:
            woken = self.watch.leave()
            if isinstance(error, StopTest):
                raise  # Hypothesis' own: this example is over its budget of draws
            outcome = of_error(error, woken)
        else:
            self.watch.leave()
            outcome = PASSED
        return replace(outcome, notes=tuple(journal.notes), scores=journal.scores)


class Leader(Rank):
    """Rank 0: inside Hypothesis, whose engine calls `example` each time it wants to know how one goes."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.broken = True  # are the groups to be made before the next example?
        self.last: JudgedExample | None = None
        self.worst: JudgedExample | None = None  # the latest that failed
        self.shown = ""  # its example, as a call of the test
        self.count = 0

    def example(self, body: Body, drawn: dict[str, Any]) -> None:
        """One example, in all ranks."""
        if self.broken:
            self.remake()
        self.number += 1
        self.count += 1
        self.watch.begin(self.number)
        describe_it = functools.partial(describe, body, drawn)
        interactive = {name: value for name, value in drawn.items() if isinstance(value, st.DataObject)}
        self._send(_pickled_example(self.number, drawn, list(interactive), body), describe_it)
        mine = {**drawn, **{name: values.LeadersData(value, self._send_draw) for name, value in interactive.items()}}
        outcome = self._perform_mine(body, mine, bool(interactive))
        settled = judge_example([outcome, *self._hear_from_all(describe_it)])
        self.watch.settled()
        self._settle(settled, describe_it)

    def _perform_mine(self, body: Body, drawn: dict[str, Any], interactive: bool) -> ExampleOutcome:
        try:
            outcome = self.perform(body, drawn)
        except StopTest:
            self.watch.alarm(self.number)
            self._tell((NO_MORE,), str)
            self._hear_from_all(self.present)
            self.watch.settled()
            self.broken = True
            raise
        if interactive:
            self._tell((NO_MORE,), str)
        if outcome.settles_alone:
            self.watch.alarm(self.number)
        return outcome

    def _settle(self, settled: JudgedExample, describe_it: Callable[[], str]) -> None:
        self.last = settled
        self.broken = settled.is_damaging or self.watch.woken == self.number
        if settled.kind is ExampleKind.PASSED:
            for label, score in settled.scores().items():
                hypothesis.target(score, label=label)
            return
        if settled.kind is ExampleKind.REJECTED:
            hypothesis.reject()
        if settled.kind is ExampleKind.SKIPPED:
            raise Abandoned
        self.worst, self.shown = settled, describe_it()
        _fail(settled)

    def remake(self) -> None:
        """New groups for all: the last example may have left the old ones in any state."""
        self.groups.end()
        self._tell((REMAKE,), str)
        self.groups.make()
        self._hear_from_all(str)  # or this rank might leave before the others have met it
        self.broken = False

    def _send_draw(self, value: Any) -> None:
        self._tell((DRAWN, pickle.dumps(value)), str)

    def _tell(self, message: Any, describe_it: Callable[[], str]) -> None:
        self._send(pickle.dumps(message), describe_it)

    def _send(self, data: bytes, describe_it: Callable[[], str]) -> None:
        for rank, link in self.links.items():
            try:
                link.talk.send_bytes(data)
            except OSError:
                self._lost(rank, describe_it)

    def _hear_from_all(self, describe_it: Callable[[], str]) -> list[Any]:
        """One after the other: if one is lost, those before it are woken, and do not keep this one waiting."""
        return [self._hear_from(rank, describe_it) for rank in self.links]

    def _hear_from(self, rank: int, describe_it: Callable[[], str]) -> Any:
        link = self.links[rank]
        while not link.has_news(PATIENCE / 10):
            if self.watch.seconds_since_woken(self.number) > PATIENCE:
                self._stuck(rank, describe_it)
        try:
            return _unpacked(link.talk.recv_bytes())
        except (EOFError, OSError):
            self._lost(rank, describe_it)

    def _lost(self, rank: int, describe_it: Callable[[], str]) -> NoReturn:
        raise Abandoned(f"rank {rank} was lost {self._where(describe_it())}")

    def _where(self, example: str) -> str:
        return f"in this example: {example}" if example else "between two examples"

    def _stuck(self, first: int, describe_it: Callable[[], str]) -> NoReturn:
        stuck = [rank for rank, link in self.links.items() if rank >= first and not link.has_news(0)]
        names = ", ".join(map(str, stuck))
        raise Abandoned(
            f"rank {names} waits for something else than the network, and so could not be made to leave with the "
            f"others, who did {PATIENCE:.0f} s ago; nothing was shrunk {self._where(describe_it())}"
        )

    def end(self, ending: PropertyEnd) -> None:
        """Tell the others that all is over: the one who reports a failure first, the rest when it is gone. Whoever
        ends first is the culprit that the verdict begins with."""
        first = ending.culprits[0] if ending.culprits else 0
        for rank in sorted(self.links, key=lambda rank: rank != first):
            with suppress(EOFError, OSError):
                self.links[rank].talk.send_bytes(pickle.dumps((END, ending)))
                if rank == first:
                    self.links[rank].talk.recv_bytes()  # until it is gone


class Follower(Rank):
    """Any other rank: does as rank 0 says, until it says that all is over."""

    def follow(self, body: Body) -> PropertyEnd:
        """Returns what rank 0 says at the end."""
        while True:
            what, *details = self._hear()
            if what == EXAMPLE:
                self._take_part(body, *details)
            elif what == REMAKE:
                self.groups.end()
                self.groups.make()
                self._say(None)
            elif what == END:
                return self._take_leave(details[0])

    def _take_leave(self, ending: PropertyEnd) -> PropertyEnd:
        if ending.culprits and ending.culprits[0] == 0:
            with suppress(EOFError, OSError):
                self.links[0].talk.recv_bytes()  # rank 0 reports first: until it is gone
        return ending

    def _take_part(self, body: Body, number: int, drawn: dict[str, Any], interactive: list[str]) -> None:
        self.number = number
        self.watch.begin(number)
        drawn.update({name: values.FollowersData(self._hear_draw, self.rank) for name in interactive})
        with internals.next_example():
            outcome = self.perform(body, drawn)
        if outcome.settles_alone:
            self.watch.alarm(number)
        self._say(outcome)

    def _say(self, what: Any) -> None:
        with suppress(OSError):  # rank 0 is gone: that is found out when it is listened to
            self.links[0].talk.send_bytes(_PASSED if what == PASSED else pickle.dumps(what))

    def _hear(self) -> Any:
        try:
            return pickle.loads(self.links[0].talk.recv_bytes())
        except (EOFError, OSError):
            raise PeerLost("rank 0 was lost") from None

    def _hear_draw(self) -> Any:
        what, *details = self._hear()
        if what == DRAWN:
            return pickle.loads(details[0])
        raise values.NoMoreDraws("rank 0 draws no more in this example: it failed, or the ranks draw differently")


def _fail(settled: JudgedExample) -> NoReturn:
    raise PropertyFailure(settled.describe(), settled)


# What is said most often.
PASSED = ExampleOutcome(ExampleKind.PASSED)
_PASSED = pickle.dumps(PASSED)


def _unpacked(data: bytes) -> Any:
    return PASSED if data == _PASSED else pickle.loads(data)


def _pickled_example(number: int, drawn: Mapping[str, Any], interactive: list[str], body: Body) -> bytes:
    sent = {name: value for name, value in drawn.items() if name not in interactive}
    try:
        return pickle.dumps((EXAMPLE, number, sent, interactive))
    except Exception as error:
        culprit = next((name for name, value in sent.items() if not _can_be_pickled(value)), "?")
        raise Abandoned(
            f"{body.func.__name__}: the argument {culprit!r} cannot be sent to the other ranks ({error}): draw "
            f"something that can be pickled, and make the rest of it in the test"
        ) from None


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def describe(body: Body, drawn: Mapping[str, Any]) -> str:
    """The example as a call of the test."""
    return f"{body.func.__name__}({', '.join(f'{name}={value!r}' for name, value in drawn.items())})"
