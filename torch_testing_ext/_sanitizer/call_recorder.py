"""Writes down all that a rank issues, before it is issued, and has the tensors checked."""

from __future__ import annotations

import json
import sys
import threading
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torch_testing_ext import _torch
from torch_testing_ext._collectives.issued import Issued, Tensor
from torch_testing_ext._collectives.records import GroupRecord
from torch_testing_ext._torch import hook
from torch_testing_ext._torch.hook import OpSpec

from .checks import Check, tensors_of
from .log import NO_GROUP, LogWriter

# Groups that do not communicate, or whose ranks are threads with a log of their own.
_NOT_COMPARED = ("fake", "threaded")
_OURS = (str(Path(__file__).parent), str(Path(hook.__file__).parent))


class CallRecorder:
    """Hears of each operation of c10d from the hook. It keeps an error of its own, and raises it to the caller, too."""

    def __init__(self, log: LogWriter, checks: list[Check]):
        self._log = log
        self._checks = checks
        self._after = [check for check in checks if check.wants_results]
        self._lock = threading.RLock()  # a signal's handler may issue a collective
        self._groups: weakref.WeakKeyDictionary[Any, tuple[int, int, float | None]] = weakref.WeakKeyDictionary()
        self._known_groups = 0
        self._whats: dict[Any, tuple[int, bytes | None]] = {}
        self._sites: dict[tuple[str, int], int] = {}
        self._is_of_torch: dict[str, bool] = {}
        self.error = ""

    # -- the listener of the hook

    def before(self, spec: OpSpec, args: tuple[Any, ...]) -> int:
        try:
            with self._lock:
                number, site, group = self._before(spec, args)
            for check in self._checks:
                check.before(spec, args, site, group)
            return number
        except Exception as error:
            self._keep(error)
            raise

    def _before(self, spec: OpSpec, args: tuple[Any, ...]) -> tuple[int, int, Any]:
        group = hook.group_of(spec, args)
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = self._look_up(group)
        number = known[0]
        inputs = () if spec.inputs is None else signature(args[spec.inputs])
        outputs = inputs if spec.outputs == spec.inputs or spec.outputs is None else signature(args[spec.outputs])
        op = None if spec.op is None else int(args[spec.op].op())
        root = None if spec.root is None else args[spec.root]
        peer = None if spec.peer is None else (args[spec.peer], args[spec.tag])  # type: ignore[index]
        timeout = args[spec.timeout] if spec.timeout is not None and len(args) > spec.timeout else -1
        splits = None if spec.splits is None else (tuple(args[spec.splits]), tuple(args[spec.splits + 1]))
        key = spec.name, number, inputs, outputs, op, root, peer, timeout, splits
        what = self._whats.get(key)
        if what is None:
            what = self._whats[key] = self._describe(spec, args, known)
        site = self.site()
        if _on_meta(inputs, args, spec):
            number = NO_GROUP
        return self._log.issue(number, what[0], what[1], site), site, group

    def after(self, spec: OpSpec, number: int, args: tuple[Any, ...], result: Any) -> None:
        if self._after:
            try:
                for check in self._after:
                    check.after(spec, args, result, self.site())
            except Exception as error:
                self._keep(error)
                raise

    def raised(self, number: int) -> None:
        self._log.raised(number)

    def _keep(self, error: Exception) -> None:
        """Keep an error of ours. One that a signal's handler of the test has raised in between is not."""
        frames = traceback.extract_tb(error.__traceback__)
        if not self.error and frames and (frames[-1].filename.startswith(_OURS) or self._torchs(frames[-1].filename)):
            self.error = "".join(traceback.format_exception(error))
            with suppress(Exception):  # `finish` raises it in any case, unless the rank ends before
                text = f"the sanitizer failed: {type(error).__name__}: {error}"
                self._log.note({"kind": "recorder", "text": text})

    # -- what is written

    def _look_up(self, group: Any) -> tuple[int, int, float | None]:
        """The number of a group among those that the rank has made, its size, and its time-out."""
        self.note_groups()
        number = _torch.flight_recorder.number_of_group(group)
        if number is None or _torch.flight_recorder.made_groups()[number].backend in _NOT_COMPARED:
            return NO_GROUP, 0, None
        made = _torch.flight_recorder.made_groups()[number]
        return number, len(made.members), hook.timeout_of_group(group)

    def note_groups(self) -> None:
        """Write down the groups that have been made since the last time."""
        with self._lock:
            made = _torch.flight_recorder.made_groups()
            for one in made[self._known_groups :]:
                self._log.add_group(GroupRecord(one.name, one.description, one.members, one.index, one.world))
            self._known_groups = len(made)

    def has_shorter_timeouts(self) -> bool:
        """Has a group got a shorter time-out since it was first used?"""
        for group, (_, _, before) in list(self._groups.items()):
            timeout = hook.timeout_of_group(group)
            if before is not None and timeout is not None and timeout < before:
                return True
        return False

    def _describe(
        self, spec: OpSpec, args: tuple[Any, ...], known: tuple[int, int, float | None]
    ) -> tuple[int, bytes | None]:
        _, size, timeout = known
        inputs = () if spec.inputs is None else _tensors_of(args[spec.inputs])
        outputs = inputs if spec.outputs == spec.inputs or spec.outputs is None else _tensors_of(args[spec.outputs])
        own = args[spec.timeout] if spec.timeout is not None and len(args) > spec.timeout else -1
        issued = Issued(
            kind=spec.kind,
            inputs=inputs,
            outputs=outputs,
            op=None if spec.op is None else hook.name_of_reduce_op(int(args[spec.op].op())),
            root=None if spec.root is None else int(args[spec.root]),
            peer=None if spec.peer is None else int(args[spec.peer]),
            tag=0 if spec.tag is None else int(args[spec.tag]),
            splits=None if spec.splits is None else (tuple(args[spec.splits]), tuple(args[spec.splits + 1])),
            size=size,
            timeout=own / 1000 if own > 0 else timeout,
        )
        must_agree = None if issued.is_compared_in_pairs else json.dumps(issued.agreement()).encode()
        return self._log.text(json.dumps(issued.to_entry())), must_agree

    def site(self) -> int:
        """The number of the line of the program that issues an operation now: the innermost frame outside of torch."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            is_of_torch = self._is_of_torch.get(file)
            if is_of_torch is None:
                is_of_torch = self._is_of_torch[file] = self._torchs(file) or file.startswith(_OURS)
            if not is_of_torch:
                place = file, frame.f_lineno
                number = self._sites.get(place)
                if number is None:
                    text = json.dumps([*place, frame.f_code.co_name])
                    number = self._sites[place] = self._log.text(text)
                return number
            frame = frame.f_back
        return 0

    @staticmethod
    def _torchs(file: str) -> bool:
        return bool(_torch.flight_recorder.is_of_torch(file))


def signature(value: Any) -> tuple[Any, ...]:
    """Shapes and types of a tensor, a list of tensors, or a list of lists, to compare quickly."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return tuple([signature(each) for each in value])


def _tensors_of(value: Any) -> tuple[Tensor, ...]:
    return tuple((tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in tensors_of(value))


def _on_meta(inputs: tuple[Any, ...], args: tuple[Any, ...], spec: OpSpec) -> bool:
    """Are the tensors without data, as those of a trace? Nothing is then communicated."""
    place = spec.inputs if spec.inputs is not None else spec.outputs
    value = None if place is None else args[place]
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, torch.Tensor) and value.is_meta
