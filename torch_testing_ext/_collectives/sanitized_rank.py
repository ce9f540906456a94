"""The sanitizer in a rank: its begin, a note of each call, its end."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from torch_testing_ext import fault_points
from torch_testing_ext._process import system
from torch_testing_ext._torch import torch_frames
from torch_testing_ext._torch.groups import collective_errors, made_groups
from torch_testing_ext._torch.operations import operation_hook, watched_stores, watched_waits, works
from torch_testing_ext._torch.operations.operation_hook import OpSpec
from torch_testing_ext._torch.tensors import replicated_tensors
from torch_testing_ext._torch.torch_frames import FUNCTIONS_WITH_PARTS, parts_of
from torch_testing_ext.faults import STORE_OPERATIONS, FaultPlan, PlannedFault, Point

from .computed_results import Place, ResultSampler
from .failure import Site
from .records import Call, GroupRecord
from .sanitizer_kinds import AGAIN, SanitizeKind
from .sanitizer_log import NO_GROUP, LogReader, LogWriter, text_of
from .tensor_checks import Check, Delays, NanCheck, Poison, ReplicaCheck, inputs_of, outputs_of
from .watched_works import WaitCheck

# --------------------------------------------------------------------------------------------------------------------
# A rank's note of one collective, send or receive: everything that its peers must agree with.

# A tensor as its shape and the name of its type.
Tensor = tuple[tuple[int, ...], str]


_PUT_TOGETHER = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
    *("gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
)


@dataclass(frozen=True)
class Issued:
    """One operation as a rank has called it. `splits`: those of the output and of the input, along dimension 0."""

    kind: str
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    op: str | None = None
    root: int | None = None
    # Of a send or receive, in the group; None: a receive from any rank.
    peer: int | None = None
    tag: int = 0
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    # Of the group.
    size: int = 0
    timeout: float | None = None
    # The rank goes on only when it is over.
    blocks: bool = False
    # How torch puts parts together: placements of DTensors, or a dimension.
    parts: tuple[str, ...] = ()

    @property
    def is_p2p(self) -> bool:
        return self.kind in ("send", "recv")

    @property
    def is_compared_in_pairs(self) -> bool:
        """Must it agree with what another member has called, beyond what all have in common?"""
        return self.is_p2p or self.kind in ("all_to_all", "all_to_all_single")

    def to_call(self) -> Call:
        """The call as the rules read it, without what only the log knows: its order, its line, its thread."""
        shown = self.outputs if self.kind == "recv" else self.inputs
        shapes = tuple(str(list(shape)) for shape, _ in shown)
        dtypes = (dtype for _, dtype in shown)
        is_exchange = self.kind in ("all_to_all", "all_to_all_single")
        return Call(
            kind=self.kind,
            shapes=shapes,
            inputs=tuple(f"{shape} {dtype}" for shape, dtype in zip(shapes, dtypes, strict=True)),
            agreement=self.agreement(),
            timeout=self.timeout or math.inf,
            details=tuple(self._details()),
            exchange=self._exchange() if is_exchange else None,
            is_p2p=self.is_p2p,
            peer=self.peer if self.is_p2p else None,
            tag=self.tag if self.is_p2p else 0,
            tells_end=False,
            blocks=self.blocks,
            layout=self.layout(),
            parts=self.parts,
        )

    def agreement(self) -> tuple[Any, ...]:
        """The properties in which all members of the group must agree.

        Shapes may differ where the numbers of elements are equal.
        """
        inputs, outputs = _counts(self.inputs), _counts(self.outputs)
        types = tuple(sorted({dtype for _, dtype in (*self.inputs, *self.outputs)}))
        sizes: tuple[Any, ...]
        match self.kind:
            case "scatter":  # the inputs are the root's
                sizes = outputs[:1]
            case "all_gather" | "all_gather_coalesced":
                sizes = (outputs,)
            case "reduce_scatter":
                sizes = (inputs,)
            case "all_to_all" | "all_to_all_single" | "barrier" | "monitored_barrier":
                sizes = ()
            case "recv":
                sizes = outputs
            case _:
                sizes = inputs
        return self.kind, sizes, types, self.op, self.root

    def layout(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parts that are put together or taken apart, without dimensions of one element.

        Parts of other shapes make a wrong tensor. A flat part has no shape of its own.
        """
        if self.kind not in _PUT_TOGETHER:
            return ()
        if self.kind == "scatter":
            parts = self.outputs[:1]
        elif "scatter" in self.kind:
            parts = self.outputs
        else:
            parts = self.inputs
        shapes = tuple(tuple(size for size in shape if size != 1) for shape, _ in parts)
        return shapes if all(len(shape) > 1 for shape in shapes) else ()

    def _details(self) -> list[str]:
        details = []
        if self.op is not None:
            details.append(self.op)
        if self.root is not None:
            details.append(f"root {self.root}")
        if self.splits is not None and any(self.splits):
            of_outputs, of_inputs = self.splits
            details.append(f"splits {list(of_inputs)} to {list(of_outputs)}")
        elif self.kind in ("all_gather", "all_to_all") and len({shape for shape, _ in self.outputs}) > 1:
            details.append(f"into {[list(shape) for shape, _ in self.outputs]}")
        return details

    def _exchange(self) -> tuple[tuple[int, ...], ...]:
        """The number of elements that go to each member, and that come from each."""
        if self.kind == "all_to_all":
            return _counts(self.inputs), _counts(self.outputs)
        of_outputs, of_inputs = self.splits or ((), ())
        return _parts(self.inputs[0], of_inputs, self.size), _parts(self.outputs[0], of_outputs, self.size)


def _parts(tensor: Tensor, splits: Sequence[int], size: int) -> tuple[int, ...]:
    """The elements of a tensor that go to each of `size` members, or come from it."""
    shape, _ = tensor
    if not splits:
        of_each_member = math.prod(shape) // max(size, 1)
        return (of_each_member,) * size
    row = math.prod(shape[1:])
    return tuple(rows * row for rows in splits)


def _counts(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(math.prod(shape) for shape, _ in tensors)


# --------------------------------------------------------------------------------------------------------------------
# Writes down all that a rank issues, before it is issued, and has the tensors checked.

# Groups that do not communicate, or whose ranks are threads with a log of their own.
_NOT_COMPARED = ("fake", "threaded")
_OURS = (str(Path(__file__).parent), str(Path(operation_hook.__file__).parent))
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


class CallRecorder:
    """Hears of each operation of c10d from the hook. It keeps an error of its own, and raises it to the caller, too."""

    def __init__(self, log: LogWriter, checks: list[Check], without_data: bool = False, ours: str = ""):
        """`without_data`: compare groups and tensors without data, too. `ours`: a file that is not the program's."""
        self._log = log
        self._without_data = without_data
        self._checks = checks
        self._after = [check for check in checks if check.wants_results]
        # A signal's handler may issue a collective.
        self._lock = threading.RLock()
        self._groups: weakref.WeakKeyDictionary[Any, tuple[int, int, float | None]] = weakref.WeakKeyDictionary()
        self._known_groups = 0
        self._whats: dict[Any, tuple[int, int, bytes | None]] = {}
        # By code and instruction: reading the table of its lines takes longer than all else. The code is kept, or else
        # another one might get its id; it cannot always be hashed. No frame is kept, which would keep tensors alive.
        self._sites: dict[tuple[int, int], tuple[CodeType, int]] = {}
        self._is_of_torch: dict[str, bool] = {ours: True}
        self.error = ""
        self.faults: FaultsOfRank | None = None

    # -- the listener of the hook

    def before(self, spec: OpSpec, args: tuple[Any, ...]) -> tuple[int, int]:
        """Returns the number of the operation in the log, and that of its line."""
        try:
            with self._lock:
                number, site, group = self._before(spec, args)
            for check in self._checks:
                check.before(spec, args, site, group)
        except Exception as error:
            self._keep(error)
            raise
        if self.faults is not None:
            self.faults.before_call(spec.kind, number, self._groups[group][0])
        return number, site

    def _before(self, spec: OpSpec, args: tuple[Any, ...]) -> tuple[int, int, Any]:
        """Write an operation down. Returns its number, that of its line, and its group."""
        group = operation_hook.group_of(spec, args)
        if self._known_groups != made_groups.count_of_groups():
            # One that was reconfigured has another number now.
            self._groups.clear()
            self.note_groups()
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = self._look_up(group)
        inputs = () if spec.inputs is None else signature(args[spec.inputs])
        outputs = inputs if spec.outputs == spec.inputs or spec.outputs is None else signature(args[spec.outputs])
        root = None if spec.root is None else int(args[spec.root])
        peer = None if spec.peer is None else int(args[spec.peer])
        tag = None if spec.tag is None else int(args[spec.tag])
        splits = None if spec.splits is None else (tuple(args[spec.splits]), tuple(args[spec.splits + 1]))
        timeout = args[spec.timeout] if spec.timeout is not None and len(args) > spec.timeout else -1
        kernel = sys._getframe(2)
        site, parts = self._place_of(kernel.f_back)
        blocks = operation_hook.is_synchronous(spec, args)
        blocks = blocks or (spec.is_p2p and torch_frames.is_called_as(spec.kind, torch_frames.issuer_of(kernel)))
        op = operation_hook.reduce_op_of(spec, args)
        details = op, root, peer, tag, splits, timeout, blocks, parts
        key = spec.name, known[0], inputs, outputs, details
        what = self._whats.get(key)
        if what is None:
            what = self._whats[key] = self._describe(spec, args, known, *details)
        return self._log.issue(*what, site), site, group

    def after(self, spec: OpSpec, known: tuple[int, int], args: tuple[Any, ...], result: Any) -> Any:
        other = None
        try:
            for check in self._after:
                other = check.after(spec, args, result, known[1], known[0])
        except Exception as error:
            self._keep(error)
            raise
        if self.faults is not None:
            self.faults.after_call(known[0], result)
        return other

    def raised(self, known: tuple[int, int]) -> None:
        self._log.raised(known[0])

    def _keep(self, error: Exception) -> None:
        """Keep an error of ours. One that a signal's handler of the test has raised in between is not."""
        frames = traceback.extract_tb(error.__traceback__)
        if not self.error and frames and _is_not_of_the_program(frames[-1].filename):
            self.error = "".join(traceback.format_exception(error))
            # `finish_sanitizing` raises it in any case, unless the rank ends before.
            with suppress(Exception):
                text = f"the sanitizer failed: {type(error).__name__}: {error}"
                self._log.note({"kind": "recorder", "text": text})

    # -- what is written

    def _look_up(self, group: Any) -> tuple[int, int, float | None]:
        """The number of a group among those that the rank has made, its size, and its time-out."""
        number = made_groups.number_of_group(group)
        if number is None:
            return NO_GROUP, 0, None
        made = made_groups.made_groups()[number]
        if made.backend in _NOT_COMPARED and not self._without_data:
            return NO_GROUP, 0, None
        # A backend may have none, or hide it.
        timeout = made_groups.timeout_of_group(group)
        return number, len(made.members), made.timeout if timeout is None else timeout

    def note_groups(self, site: int = 0) -> None:
        """Write down the groups that have been made since the last time."""
        with self._lock:
            made = made_groups.made_groups()
            for group in made[self._known_groups :]:
                self._log.add_group(GroupRecord.made(group.fields), site)
            self._known_groups = len(made)

    def has_shorter_timeouts(self) -> bool:
        """Has a group got a shorter time-out since it was first used?"""
        for group, (_, _, before) in list(self._groups.items()):
            now = made_groups.timeout_of_group(group)
            if before is not None and now is not None and now < before:
                return True
        return False

    def _describe(
        self,
        spec: OpSpec,
        args: tuple[Any, ...],
        known: tuple[int, int, float | None],
        op: int | None,
        root: int | None,
        peer: int | None,
        tag: int | None,
        splits: tuple[tuple[int, ...], tuple[int, ...]] | None,
        own_timeout: int,
        blocks: bool,
        parts: tuple[str, ...],
    ) -> tuple[int, int, bytes | None]:
        """The number of the group, or NO_GROUP for tensors without data, as those of a trace; that of the text; and
        what must agree, if the call is compared with those of all members."""
        number, size, timeout = known
        inputs, outputs = inputs_of(spec, args), outputs_of(spec, args)
        issued = Issued(
            kind=spec.kind,
            inputs=_described(inputs),
            outputs=_described(outputs if spec.outputs is not None else inputs),
            op=operation_hook.name_of_reduce_op(op),
            root=root,
            peer=peer,
            tag=tag or 0,
            splits=splits,
            size=size,
            timeout=own_timeout / 1000 if own_timeout > 0 else timeout,
            blocks=blocks,
            parts=parts,
        )
        all_agree = [issued.agreement(), issued.layout(), parts]
        must_agree = None if issued.is_compared_in_pairs else json.dumps(all_agree).encode()
        on_meta = not self._without_data and any(tensor.is_meta for tensor in (*inputs, *outputs))
        return NO_GROUP if on_meta else number, self._log.text(text_of(issued.to_call())), must_agree

    def site(self) -> int:
        """The number of the line of the program that runs now."""
        return self._number_of(self._frame(sys._getframe(2)))

    def _place_of(self, frame: Any) -> tuple[int, tuple[str, ...]]:
        """The number of the line that issues an operation, and what functions of torch on the way say about parts.

        The outermost of these knows best.
        """
        parts: tuple[str, ...] = ()
        of_torch = self._is_of_torch
        issuer = frame
        while frame is not None:
            code = frame.f_code
            is_of_torch = of_torch.get(code.co_filename)
            if is_of_torch is None:
                is_of_torch = of_torch[code.co_filename] = _is_not_of_the_program(code.co_filename)
            if not is_of_torch:
                return self._number_of(frame), parts
            if code.co_name in FUNCTIONS_WITH_PARTS:
                parts = parts_of(frame) or parts
            frame = frame.f_back
        return self._number_of(self._frame(issuer)), parts

    def _number_of(self, frame: Any) -> int:
        """The number of the line that a frame is at; 0 for none."""
        if frame is None:
            return 0
        code = frame.f_code
        place = id(code), frame.f_lasti
        known = self._sites.get(place)
        if known is None:
            line = [code.co_filename, frame.f_lineno, code.co_name]
            known = self._sites[place] = code, self._log.text(json.dumps(line))
        return known[1]

    def place(self) -> Place | None:
        """The code of the program that runs now, and the instruction."""
        frame = self._frame(sys._getframe(2))
        return None if frame is None else (frame.f_code, frame.f_lasti)

    def line(self) -> Site | None:
        """The line of the program that runs now."""
        frame = self._frame(sys._getframe(1))
        return None if frame is None else Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def _frame(self, frame: Any) -> Any:
        """The innermost frame of the program; in a thread of torch, as for a callback, that of the main thread."""
        place = self._outside_of_torch(frame)
        if place is None and threading.current_thread() is not threading.main_thread():
            return self._outside_of_torch(sys._current_frames().get(threading.main_thread().ident or 0))
        return place

    def _outside_of_torch(self, frame: Any) -> Any:
        while frame is not None:
            file = frame.f_code.co_filename
            is_of_torch = self._is_of_torch.get(file)
            if is_of_torch is None:
                is_of_torch = self._is_of_torch[file] = _is_not_of_the_program(file)
            if not is_of_torch:
                return frame
            frame = frame.f_back
        return None


def _is_not_of_the_program(file: str) -> bool:
    """Is this a file of ours, of torch or of Python, such as that of a context manager or a thread?"""
    is_of_python = file.startswith(_STANDARD_LIBRARY) and f"-packages{os.sep}" not in file
    return is_of_python or file.startswith(_OURS) or bool(torch_frames.is_of_torch(file))


def signature(value: Any) -> tuple[Any, ...]:
    """Describe a tensor, a list of tensors, or a list of lists, to be compared quickly."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.is_meta
    return tuple([signature(item) for item in value])


def _described(tensors: list[torch.Tensor]) -> tuple[Tensor, ...]:
    return tuple((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)


# --------------------------------------------------------------------------------------------------------------------
# The faults of a rank happen at their points: calls have the numbers of the log.

# Of a peer that is held until a call of another rank is in flight: it may not be that call of its own.
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
        self._path = path.with_name(path.name.removesuffix(AGAIN))
        self.incarnation = int(path != self._path)
        # Those that have yet to happen, by their places in the plan. A rank that is started again has none.
        self._pending: dict[int, PlannedFault] = {}
        if not self.incarnation:
            self._pending = {index: fault for index, fault in enumerate(plan.faults) if fault.rank == rank}
        self._held_for = {
            index: fault
            for index, fault in enumerate(plan.faults)
            if fault.rank != rank and fault.at is not None and fault.at.phase == "during"
        }
        self._counts: Counter[int] = Counter()
        # By group.
        self._collectives: Counter[int] = Counter()
        # What has been issued, for a fault that does not happen.
        self._seen: Counter[str] = Counter()
        self._reached: set[str] = set()
        # By the number of a call that has begun.
        self._in_flight: dict[int, int] = {}
        self._happened: dict[int, str] = {}
        wheres = {fault.at.where for fault in self._pending.values() if fault.at is not None}
        if "store" in wheres:
            watched_stores.watch_stores(self._at_store, STORE_OPERATIONS)
        self._hooks: list[Any] = []
        if "step" in wheres or not plan.faults:
            self._hooks = replicated_tensors.watch_steps(self._before_step, self._after_step)
        fault_points.rank = self  # type: ignore[assignment]

    def finish(self) -> None:
        """The test has returned: write down what it has passed on its way."""
        for hook in self._hooks:
            hook.remove()
        if not self.incarnation:
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
        reader = self._log_of(fault.rank)
        until = self._now() + LONGEST_HOLD
        while self._now() < until and not _has_happened(reader, index):
            self._sleep(_PAUSE)

    def _log_of(self, rank: int | None) -> LogReader:
        name = self._path.name.replace(f"rank{self._rank}.", f"rank{rank}.", 1)
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
            raise pickle.loads(fault.error)
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
        if name not in self._reached:
            self._reached.add(name)
            self._log.event({"event": "reached", "name": name})

    def heal(self, rank: int) -> None:
        """Let a rank go on that a fault stops: at once, or when that has happened."""
        index = next(
            (i for i, fault in enumerate(self._plan.faults) if fault.rank == rank and fault.kind == "stop"), -1
        )
        if index < 0:
            raise ValueError(f"heal({rank}): no fault of this test stops that rank; give it stop(rank={rank}, at=...)")
        reader = self._log_of(rank)
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
    """Is a call of this kind in this group one of those that a point counts? `peer`: whose fault it is, if not ours."""
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


# --------------------------------------------------------------------------------------------------------------------
# Begins and ends the sanitizer in a rank that is a process.


class RecorderError(RuntimeError):
    """The sanitizer itself has failed; what it has not seen is unknown."""


class RankSanitizer:
    """The sanitizer of this rank: a recorder, its log and its checks, which another test replaces."""

    def __init__(
        self,
        rank: int,
        kinds: frozenset[SanitizeKind],
        shake: int | None,
        path: Path,
        plan: FaultPlan | None,
        wait_for_peers: Callable[[], None],
    ):
        self._log = LogWriter(path)
        self._checks: list[Check] = []
        if shake is not None:
            self._checks.append(Delays(shake, rank))
        if SanitizeKind.NAN in kinds:
            self._checks.append(NanCheck(self._note))
        if SanitizeKind.POISON in kinds:
            self._checks.append(Poison(rank))
        self._watches_uses = SanitizeKind.RACES in kinds
        wants_waits = self._watches_uses or SanitizeKind.WAITS in kinds
        self._waits: WaitCheck | None = None
        if wants_waits:
            sampler = ResultSampler(path, lambda: self._recorder.place())
            self._waits = WaitCheck(self._note, lambda: self._recorder.site(), sampler)
        if self._waits is not None:
            self._checks.append(self._waits)
        if SanitizeKind.REPLICAS in kinds:
            self._checks.append(ReplicaCheck(path, lambda: self._recorder.line()))
        self._recorder = CallRecorder(self._log, self._checks)
        self.has_shorter_timeouts = self._recorder.has_shorter_timeouts
        self._pid = os.getpid()
        if plan is not None:
            self._recorder.faults = FaultsOfRank(rank, plan, self._log, path, wait_for_peers)
        operation_hook.install()
        operation_hook.listen(self._recorder)
        collective_errors.on_error_of_collectives(self._log.error_now)
        watched_waits.watch_waits(self._on_wait, self._on_error_of_wait, self._waits, self._on_waited)
        if self._waits is not None and self._watches_uses:
            self._waits.watch_uses(other_threads=True)

    def _note(self, kind: str, text: str, site: int, issued: int) -> None:
        self._log.note({"kind": kind, "text": text, "issued": issued}, site)

    def _on_wait(self, work: object) -> None:
        if self._waits is not None:
            self._waits.waited(work)

    def _on_error_of_wait(self) -> None:
        self._log.error_now()
        collective_errors.note_error(sys._getframe(1))

    def _on_waited(self, work: object, is_complete: bool) -> None:
        if self._waits is not None:
            self._waits.wait_is_over(work, is_complete)

    def finish(self) -> None:
        """The test has returned: what is open now stays open. Raises what the recorder has failed with."""
        if os.getpid() != self._pid:
            return
        _leave_alone()
        if self._recorder.faults is not None:
            self._recorder.faults.finish()
        self._recorder.note_groups()
        for check in self._checks:
            check.finish()
        if self._recorder.error:
            raise RecorderError(f"the sanitizer failed, so its findings are not complete:\n{self._recorder.error}")


_current: RankSanitizer | None = None


def prepare_hook(wanted: bool) -> None:
    """Install the hook, for this process and those that it forks, or remove it."""
    if wanted:
        operation_hook.install()
    else:
        operation_hook.remove()


def begin_sanitizing(
    rank: int,
    kinds: frozenset[SanitizeKind],
    shake: int | None,
    path: Path,
    plan: FaultPlan | None = None,
    wait_for_peers: Callable[[], None] = lambda: None,
) -> None:
    """Sanitize this process from now on; its log is a new file at `path`. `plan`: the faults of its test."""
    global _current
    if _current is None:
        os.register_at_fork(after_in_child=_leave_alone)
    _current = RankSanitizer(rank, kinds, shake, path, plan, wait_for_peers)


def is_active() -> bool:
    return _current is not None


def has_shorter_timeouts() -> bool:
    """Has a group got a shorter time-out since it was first used? The log does not know it."""
    return _current is not None and _current.has_shorter_timeouts()


def _leave_alone() -> None:
    """Sanitize this process no more. One that a test forks shares the memory of the log: it must not write there."""
    operation_hook.listen(None)
    collective_errors.on_error_of_collectives(None)
    watched_waits.watch_waits(None, None)
    watched_stores.watch_stores(None)
    fault_points.rank = None


def finish_sanitizing() -> None:
    """The test has returned. Raises RecorderError."""
    global _current
    current, _current = _current, None
    if current is not None:
        current.finish()
