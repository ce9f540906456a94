"""The planned faults of a rank, which happen at their points: calls have the numbers of the log."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_testing_ext import fault_points
from torch_testing_ext._collectives.records.issued_calls import GroupRecord
from torch_testing_ext._process import system
from torch_testing_ext._torch.groups import made_groups
from torch_testing_ext._torch.operations import backend_calls, watched_stores, works
from torch_testing_ext._torch.tensors import replicated_tensors
from torch_testing_ext.faults import FaultPlan, PlannedFault, Point

from .sanitizer_kinds import AGAIN
from .sanitizer_log import NO_GROUP, LogReader, LogWriter

# The seconds for which a peer is held until a call of another rank is in flight, which may be no call of the peer.
LONGEST_HOLD = 5.0
_PAUSE = 0.0005


class FaultsOfRank:
    """Has the faults of this rank happen, and writes down what the verdict must know of them.

    It is what `fault_point`, `reached` and `heal` find in a test with faults.
    """

    # Taken before a test could replace them.
    _now, _sleep = staticmethod(time.monotonic), staticmethod(time.sleep)

    def __init__(self, rank: int, plan: FaultPlan, log: LogWriter, path: Path, wait_for_peers: Callable[[], None]):
        """`wait_for_peers`: returns when no peer is still making a group that this rank has made."""
        self._rank = rank
        self._wait_for_peers = wait_for_peers
        self._plan = plan
        self._log = log
        self.incarnation = path.name.count(AGAIN)
        self._path = path.with_name(path.name.removesuffix(AGAIN * self.incarnation))
        # The faults that have yet to happen in this process, by their places in the plan.
        self._pending: dict[int, PlannedFault] = {
            index: fault
            for index, fault in enumerate(plan.faults)
            if fault.rank == rank and fault.incarnation == self.incarnation
        }
        self.loses_ranks = any(fault.is_deadly or fault.ends_rank for fault in plan.faults)
        self._held_for = {
            index: fault
            for index, fault in enumerate(plan.faults)
            if fault.rank != rank and fault.at is not None and fault.at.phase == "during"
        }
        self._counts: Counter[int] = Counter()
        # The number of collectives in each group.
        self._collectives: Counter[int] = Counter()
        # What has been issued, for a fault that does not happen.
        self._seen: Counter[str] = Counter()
        # The moment at which each name was reached last.
        self._reached: dict[str, float] = {}
        # The group of each call that has begun, by the number of the call.
        self._in_flight: dict[int, int] = {}
        self._happened: dict[int, str] = {}
        wheres = {fault.at.where for fault in self._pending.values() if fault.at is not None}
        if "store" in wheres:
            watched_stores.hooks.tell(self._at_store)
        # Calls that are not in the log, since no process group is known that issues them, have numbers below 0.
        self._unlogged = itertools.count(-2, -1)
        if "call" in wheres:
            backend_calls.hooks.tell(self._at_backend)
        self._hooks: list[Any] = []
        if "step" in wheres or not plan.faults:
            self._hooks = replicated_tensors.watch_steps(self._before_step, self._after_step)
        fault_points.rank = self  # type: ignore[assignment]

    def finish(self) -> None:
        """The test has returned: write down what it has passed on its way."""
        for hook in self._hooks:
            hook.remove()
        for name, at in self._reached.items():
            self._log.event({"event": "reached", "name": name, "at": at})
        counts = {index: self._counts[index] for index in self._pending}
        self._log.event({"event": "seen", "counts": counts, "seen": dict(self._seen)})

    # -- points

    def before_call(self, kind: str, number: int, group: int) -> None:
        """A call is about to be issued; it has this number in the log, and its group this one."""
        self._seen[kind] += 1
        is_message = kind in ("send", "recv")
        self._collectives[group] += not is_message
        for index, fault in self._at_call(self._held_for, kind, group):
            del self._held_for[index]
            self._hold(index, fault)
        for index, fault in self._at_call(self._pending, kind, group):
            self._wait_for_peers()
            number_in_group = "" if is_message else f" #{self._collectives[group]}"
            self._happened[index] = f"{kind}{number_in_group}{_of_group(group)}"
            if fault.at is not None and fault.at.phase != "before":
                self._in_flight[number] = index
                continue
            if fault.is_deadly or fault.kind == "raises":
                # It is not issued.
                self._log.raised(number)
            self._happen(index)

    def _at_backend(self, kind: str, issue: Callable[[], Any]) -> Any:
        """Issue a call of a backend that the program has made itself."""
        number = next(self._unlogged)
        self.before_call(kind, number, NO_GROUP)
        result = issue()
        self.after_call(number, result)
        return result

    def _at_call(self, among: dict[int, PlannedFault], kind: str, group: int) -> list[tuple[int, PlannedFault]]:
        """The faults whose point is this call. Counts it."""
        found = []
        for index, fault in among.items():
            peer = None if fault.rank == self._rank else fault.rank
            if fault.at is not None and _is_at(fault.at, kind, group, peer):
                self._counts[index] += 1
                if self._counts[index] == fault.at.n:
                    found.append((index, fault))
        return found

    def after_call(self, number: int, result: Any) -> None:
        """A call has been issued, and may be in flight."""
        index = self._in_flight.pop(number, None)
        if index is None:
            return
        work = works.work_of(result)
        at = self._pending[index].at
        if at is not None and at.phase == "during":
            if work is None or work.is_completed():
                self._log.event({"event": "missed", "fault": index, "place": self._happened[index]})
                return
        elif work is not None:
            try:
                work.wait()
            except Exception:
                # The program gets this error where it waits.
                return
        self._happen(index)

    def _hold(self, index: int, fault: PlannedFault) -> None:
        """Wait until the call of another rank is in flight, of which this one is to be issued later."""
        reader = self._log_of(fault.rank, fault.incarnation)
        until = self._now() + LONGEST_HOLD
        while self._now() < until and not _has_happened(reader, index):
            self._sleep(_PAUSE)

    def _log_of(self, rank: int | None, incarnation: int) -> LogReader:
        name = self._path.name.replace(f"rank{self._rank}.", f"rank{rank}.", 1) + AGAIN * incarnation
        return LogReader(self._path.with_name(name))

    def _at_store(self, op: str, is_over: bool) -> None:
        self._seen[f"store {op}"] += not is_over
        self._pass("store", op, is_over)

    def _before_step(self, *_: Any) -> None:
        self._seen["step"] += 1
        self._pass("step", "", is_over=False)

    def _after_step(self, *_: Any) -> None:
        self._pass("step", "", is_over=True)

    def mark(self, name: str) -> None:
        """The program passes this point."""
        self._seen[f"mark {name}"] += 1
        self._pass("mark", name, is_over=False)

    def _pass(self, where: str, name: str, is_over: bool) -> None:
        """Count a passage of points that are no calls, and have faults happen."""
        for index, fault in list(self._pending.items()):
            at = fault.at
            if at is None or at.where != where or (at.phase == "after") != is_over:
                continue
            if (at.op or at.name or name) == name:
                self._counts[index] += 1
                if self._counts[index] == at.n:
                    self._wait_for_peers()
                    what = {"store": f"{name} on a store", "step": "optimizer step", "mark": repr(name)}[where]
                    self._happened[index] = f"{what} #{at.n}"
                    self._happen(index)

    # -- faults

    def _happen(self, index: int) -> None:
        fault = self._pending.pop(index)
        phase = fault.at.phase if fault.at is not None else ""
        place = f"{'at' if phase == 'before' else phase} {self._happened[index]}"
        self._log.event({"event": "fault", "fault": index, "place": place, "pid": os.getpid(), "at": self._now()})
        if fault.kind == "raises":
            error = pickle.loads(fault.error)
            error.is_planned_fault = True  # a rank fails by it in whatever thread: see `launch.causes.fails_rank`
            raise error
        if fault.kind == "exits":
            os._exit(fault.code)
        elif fault.kind == "stop":
            if fault.seconds is not None:
                system.continue_after(fault.seconds)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "slow":
            self._sleep(fault.seconds or 0.0)
        elif fault.kind == "hold_gil":
            system.hold_gil(fault.seconds or 0.0)
        else:
            system.die_by(-(fault.exit_code or 0))

    # -- for the program

    def reached(self, name: str) -> None:
        """The program has come to this line."""
        is_new = name not in self._reached
        self._reached[name] = self._now()
        if is_new:
            self._log.event({"event": "reached", "name": name, "at": self._reached[name]})

    def heal(self, rank: int) -> None:
        """Let a rank go on that a fault stops: at once, or when that has happened."""
        index = next(
            (i for i, fault in enumerate(self._plan.faults) if fault.rank == rank and fault.kind == "stop"), -1
        )
        if index < 0:
            raise ValueError(f"heal({rank}): no fault of this test stops that rank; give it stop(rank={rank}, at=...)")
        reader = self._log_of(rank, self._plan.faults[index].incarnation)
        while not _has_happened(reader, index):
            self._sleep(_PAUSE)
        content = reader.read()
        assert content is not None
        pid = next(event["pid"] for event in content.events if event.get("fault") == index)
        while not system.is_stopped(pid):
            self._sleep(_PAUSE)
        os.kill(pid, signal.SIGCONT)


def _has_happened(reader: LogReader, index: int) -> bool:
    if not reader.count_of_events():
        return False
    content = reader.read()
    return content is not None and any(event.get("fault") == index for event in content.events)


def _is_at(at: Point, kind: str, group: int, peer: int | None) -> bool:
    """Whether a point counts calls of this kind in this group. `peer`: whose fault it is, if not ours."""
    if at.where != "call" or (at.op is not None and at.op != kind):
        return False
    record = _group_at(group)
    if record is None:
        return not (at.group or at.members)
    if peer is not None and peer not in record.members:
        return False
    if at.members and at.members != tuple(sorted(record.members)):
        return False
    return at.group is None or at.group in record.names


def _of_group(group: int) -> str:
    record = _group_at(group)
    return "" if record is None or record.is_default else f" of {record.title}"


def _group_at(number: int) -> GroupRecord | None:
    """The group that this process has made as this one; None for a call whose group is not known."""
    made = made_groups.made_groups()
    return GroupRecord.made(made[number].fields) if 0 <= number < len(made) else None
