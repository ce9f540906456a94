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
from torch_testing_ext._collectives.records import GroupRecord, Site
from torch_testing_ext._torch import hook
from torch_testing_ext._torch.hook import OpSpec
from torch_testing_ext._torch.parts import parts_of

from .checks import Check, inputs_of, outputs_of
from .log import NO_GROUP, LogWriter, text_of

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
        self._whats: dict[Any, tuple[int, int, bytes | None]] = {}
        self._sites: dict[tuple[str, int], int] = {}
        self._is_of_torch: dict[str, bool] = {}
        self.error = ""

    # -- the listener of the hook

    def before(self, spec: OpSpec, args: tuple[Any, ...]) -> tuple[int, int]:
        """Returns the number of the operation in the log, and that of its line."""
        try:
            with self._lock:
                number, site, group = self._before(spec, args)
            for check in self._checks:
                check.before(spec, args, site, group)
            return number, site
        except Exception as error:
            self._keep(error)
            raise

    def _before(self, spec: OpSpec, args: tuple[Any, ...]) -> tuple[int, int, Any]:
        """Write an operation down. Returns its number, that of its line, and its group."""
        group = hook.group_of(spec, args)
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = self._look_up(group)
        inputs = () if spec.inputs is None else signature(args[spec.inputs])
        outputs = inputs if spec.outputs == spec.inputs or spec.outputs is None else signature(args[spec.outputs])
        root, peer, tag = (None if place is None else int(args[place]) for place in (spec.root, spec.peer, spec.tag))
        splits = None if spec.splits is None else (tuple(args[spec.splits]), tuple(args[spec.splits + 1]))
        timeout = args[spec.timeout] if spec.timeout is not None and len(args) > spec.timeout else -1
        kernel = sys._getframe(2)
        blocks = hook.is_synchronous(spec, args)
        blocks = blocks or (spec.is_p2p and hook.is_called_as(spec.kind, hook.issuer_of(kernel)))
        details = hook.reduce_op_of(spec, args), root, peer, tag, splits, timeout, blocks, self._parts(kernel.f_back)
        key = spec.name, known[0], inputs, outputs, details
        what = self._whats.get(key)
        if what is None:
            what = self._whats[key] = self._describe(spec, args, known, *details)
        site = self.site()
        return self._log.issue(*what, site), site, group

    def after(self, spec: OpSpec, known: tuple[int, int], args: tuple[Any, ...], result: Any) -> None:
        try:
            for check in self._after:
                check.after(spec, args, result, known[1])
        except Exception as error:
            self._keep(error)
            raise

    def raised(self, known: tuple[int, int]) -> None:
        self._log.raised(known[0])

    def _keep(self, error: Exception) -> None:
        """Keep an error of ours. One that a signal's handler of the test has raised in between is not."""
        frames = traceback.extract_tb(error.__traceback__)
        if not self.error and frames and _is_not_of_the_program(frames[-1].filename):
            self.error = "".join(traceback.format_exception(error))
            with suppress(Exception):  # `finish` raises it in any case, unless the rank ends before
                text = f"the sanitizer failed: {type(error).__name__}: {error}"
                self._log.note({"kind": "recorder", "text": text})

    # -- what is written

    def _look_up(self, group: Any) -> tuple[int, int, float | None]:
        """The number of a group among those that the rank has made, its size, and its time-out."""
        self.note_groups()
        number = _torch.flight_recorder.number_of_group(group)
        if number is None:
            return NO_GROUP, 0, None
        made = _torch.flight_recorder.made_groups()[number]
        if made.backend in _NOT_COMPARED:
            return NO_GROUP, 0, None
        # A backend may have none, or hide it.
        timeout = hook.timeout_of_group(group)
        return number, len(made.members), made.timeout if timeout is None else timeout

    def note_groups(self) -> None:
        """Write down the groups that have been made since the last time."""
        with self._lock:
            made = _torch.flight_recorder.made_groups()
            for group in made[self._known_groups :]:
                self._log.add_group(GroupRecord(*group.fields[:-1]))
            self._known_groups = len(made)

    def has_shorter_timeouts(self) -> bool:
        """Has a group got a shorter time-out since it was first used?"""
        for group, (_, _, before) in list(self._groups.items()):
            now = hook.timeout_of_group(group)
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
            op=hook.name_of_reduce_op(op),
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
        on_meta = any(tensor.is_meta for tensor in (*inputs, *outputs))
        return NO_GROUP if on_meta else number, self._log.text(text_of(issued.to_call())), must_agree

    def site(self) -> int:
        """The number of the line of the program that issues an operation now."""
        frame = self._frame(sys._getframe(2))
        if frame is None:
            return 0
        place = frame.f_code.co_filename, frame.f_lineno
        number = self._sites.get(place)
        if number is None:
            number = self._sites[place] = self._log.text(json.dumps([*place, frame.f_code.co_name]))
        return number

    def line(self) -> Site | None:
        """The line of the program that runs now."""
        frame = self._frame(sys._getframe(1))
        return None if frame is None else Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def _frame(self, frame: Any) -> Any:
        """The innermost frame outside of torch; in a thread of torch, as for a callback, that of the main thread."""
        found = self._outside_of_torch(frame)
        if found is None and threading.current_thread() is not threading.main_thread():
            return self._outside_of_torch(sys._current_frames().get(threading.main_thread().ident or 0))
        return found

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

    def _parts(self, frame: Any) -> tuple[str, ...]:
        """Find what functions of torch that issue an operation say about parts; the outermost knows best."""
        parts: tuple[str, ...] = ()
        while frame is not None and self._is_of_torch.get(frame.f_code.co_filename, True):
            parts = parts_of(frame) or parts
            frame = frame.f_back
        return parts


def _is_not_of_the_program(file: str) -> bool:
    return file.startswith(_OURS) or bool(_torch.flight_recorder.is_of_torch(file))


def signature(value: Any) -> tuple[Any, ...]:
    """Describe a tensor, a list of tensors, or a list of lists, to be compared quickly."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.is_meta
    return tuple([signature(item) for item in value])


def _described(tensors: list[torch.Tensor]) -> tuple[Tensor, ...]:
    return tuple((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)
