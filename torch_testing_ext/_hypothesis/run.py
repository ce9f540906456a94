"""A whole property test in a rank: meet the others, go through the examples, say how it ended."""

from __future__ import annotations

import functools
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import hypothesis
import torch.distributed as dist
from hypothesis import Phase
from hypothesis.errors import Flaky

from . import internals
from .connections import Connections
from .groups import Groups
from .links import PeerLost, meet
from .ranks import Abandoned, Body, Follower, Leader, PropertyEnd, PropertyFailure, Rank
from .watchdog import Watchdog

__unittest = True
__rank_frame__ = True

_LONGEST_TITLE = 300
# Survivors report a little after the parent has seen the death that they report: the dead rank is the culprit.
_LATER = 0.1


def run(test: Any, prop: Callable[..., None], body: Body) -> None:
    """`prop` is the body as Hypothesis made a test of it."""
    chosen = _settings_for_ranks(internals.settings_of(prop))
    deadline = chosen.deadline.total_seconds() if isinstance(chosen.deadline, timedelta) else None
    with _part(test, deadline) as part:
        if isinstance(part, Leader):
            internals.put_settings(prop, hypothesis.settings(chosen, deadline=None))
            _lead(part, test, prop)
        else:
            assert isinstance(part, Follower)
            _follow(part, body)


def _settings_for_ranks(chosen: hypothesis.settings) -> hypothesis.settings:
    """As the test has them, less what cannot be had across ranks.

    The deadline is for a hang, and there is none unless the test sets one: Hypothesis' own would compare times, of
    which one rank alone knows. To explain a failure it traces the lines that one process runs. And it would look for
    several bugs, where we tell it of one.
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
def _part(test: Any, deadline: float | None) -> Iterator[Rank]:
    rank, world_size = test.rank, int(test.world_size)
    links = meet(test.file_name, rank, world_size)
    wires = Connections()
    groups = Groups(rank, world_size, _backend(test), f"{test.file_name}.{_number(test)}", wires)
    alarms = {other: link.alarm for other, link in links.items()}
    watch = Watchdog(alarms, rank == 0, wires, deadline)
    part = (Leader if rank == 0 else Follower)(rank, world_size, links, groups, watch)
    Rank.current = part
    try:
        yield part
    except BaseException:
        _until_exit.append(links)  # others wait for the end of this process, which is to come before theirs
        raise
    else:
        for link in links.values():
            link.close()
    finally:
        Rank.current = None
        watch.close()


_until_exit: list[Any] = []


def _number(test: Any) -> int:
    """Which property this is in its test: files must not be met again."""
    test.__dict__["_properties_run"] = number = test.__dict__.get("_properties_run", 0) + 1
    return number


def _backend(test: Any) -> str:
    if dist.is_initialized():
        return dist.get_backend()
    chosen = getattr(test, "backend", None)
    return chosen if isinstance(chosen, str) else "gloo"


def _lead(leader: Leader, test: Any, prop: Callable[..., None]) -> None:
    seed = internals.choose_seed(prop)
    lines: list[str] = []
    ending = PropertyEnd()
    try:
        with internals.reports_into(lines):
            prop(test)
        if leader.broken:
            leader.remake()  # for what the test does after this
    except PropertyFailure as failure:
        ending = _failed(leader, failure, [*lines, *getattr(failure, "__notes__", ())], seed)
    except Flaky:
        if leader.worst is None:
            raise
        ending = _flaky(leader, seed)
    except Abandoned as abandoned:
        ending = _abandoned(leader, abandoned)
    finally:
        leader.end(ending)
    _conclude(leader, ending)


def _abandoned(leader: Leader, abandoned: Abandoned) -> PropertyEnd:
    if str(abandoned):
        return PropertyEnd((0,), str(abandoned), lost=True)
    assert leader.last is not None
    return PropertyEnd(
        skips={rank: o.summary for rank, o in enumerate(leader.last.outcomes) if o.kind.value == "skipped"}
    )


def _failed(leader: Leader, failure: PropertyFailure, lines: list[str], seed: int | None) -> PropertyEnd:
    settled = failure.settled
    assert settled is not None
    title = f"{_short(leader.shown)} {settled.headline()}"
    found = f"the smallest that Hypothesis found, in {leader.count} runs of the test"
    parts = [
        title,
        "\n".join(_without_self(lines)),
        f"In this example ({found}):\n{settled.describe()}",
        settled.notes(),
        settled.tracebacks(),
        _how_again(seed),
    ]
    return PropertyEnd(settled.culprits, "\n\n".join(part for part in parts if part))


def _flaky(leader: Leader, seed: int | None) -> PropertyEnd:
    settled = leader.worst
    assert settled is not None
    title = (
        f"{_short(leader.shown)} failed, and then did not fail when it was run again: what the test does depends on "
        f"something else than the example, such as timing, or what earlier examples left behind"
    )
    parts = [title, f"When it failed:\n{settled.describe()}", settled.tracebacks(), _how_again(seed)]
    return PropertyEnd(settled.culprits, "\n\n".join(part for part in parts if part))


def _how_again(seed: int | None) -> str:
    if seed is None:
        return "For the same examples again: run it again. They are derived from the test itself (derandomize)."
    return f"For the same examples again: @hypothesis.seed({seed}) on the test."


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TITLE else text[:_LONGEST_TITLE] + "..."


def _without_self(lines: list[str]) -> list[str]:
    kept = (line for text in lines for line in text.splitlines())
    return [line for line in kept if not line.startswith("    self=<")]


def _follow(follower: Follower, body: Body) -> None:
    try:
        ending = internals.inside(functools.partial(follower.follow, body))
    except PeerLost:
        time.sleep(_LATER)
        raise _peer_lost(follower) from None
    _conclude(follower, ending)


def _peer_lost(follower: Follower) -> Exception:
    """Rank 1 tells of the example; the others' error is of the kind that a verdict takes for a consequence."""
    if follower.rank == 1:
        return PeerLost(f"rank 0 was lost in this example: {follower.present()}")
    return PeerLost("rank 0 was lost: connection closed by peer")


def _conclude(part: Rank, ending: PropertyEnd) -> None:
    if ending.lost:
        time.sleep(_LATER)
        raise PeerLost(ending.report if part.rank == 0 else "a rank was lost: connection closed by peer") from None
    if part.rank in ending.skips:
        raise unittest.SkipTest(ending.skips[part.rank])
    if part.rank not in ending.culprits:
        return
    first = ending.culprits[0]
    if part.rank == first:
        raise PropertyFailure(ending.report) from None
    raise PropertyFailure(f"failed in the example that rank {first} reports") from None
