"""A whole property test in one rank: connect to the others, run the examples, report the result."""

from __future__ import annotations

import functools
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import hypothesis
import torch.distributed as dist
from hypothesis import Phase
from hypothesis.errors import Flaky, Unsatisfiable

from . import hypothesis_internals, replayed_examples
from .example_outcomes import ExampleKind, PropertyResult
from .example_watchdog import Watchdog
from .groups_of_examples import Connections, Groups
from .links import PeerLost, PeerLostElsewhere, connect_ranks
from .property_roles import Abandoned, Body, Follower, Leader, Participant, PropertyFailure

__unittest = True
_LONGEST_TITLE = 300
# A longer example, or one of several lines, comes after what happened.
_LONGEST_BEFORE_CAUSE = 200
# The parent must see the death of a rank before it sees the errors of the survivors, so that the verdict blames the
# dead rank.
_SURVIVOR_DELAY = 0.1


def run_property(test: Any, prop: Callable[..., None], body: Body) -> None:
    """Run a property in this rank. `prop` is the body after `hypothesis.given`."""
    examples = replayed_examples.replayed(prop, int(test.world_size))
    own_settings = hypothesis_internals.settings_of(prop)
    chosen = _settings_for_ranks(replayed_examples.settings_for(own_settings, examples))
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
    leader: Leader, body: Body, prop: Callable[..., None], examples: Sequence[replayed_examples.Example] | None
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
            # The rest of the test needs groups.
            leader.recreate_groups()
    except PropertyFailure as failure:
        lines += getattr(failure, "__notes__", ())
        result = _failed(leader, failure, lines, seed, replayed_examples.reason_of_example(leader.arguments, examples))
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
