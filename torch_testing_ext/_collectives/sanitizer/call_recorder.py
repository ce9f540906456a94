"""The recorder of all that a rank issues: it writes each call down before it is issued, and has the tensors checked."""

from __future__ import annotations

import json
import sys
import threading
import traceback
import weakref
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from torch_testing_ext._collectives.records.issued_calls import GroupRecord
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._tests.source_files import is_head_of_function
from torch_testing_ext._torch.groups import made_groups
from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext._torch.operations.operation_hook import OpSpec
from torch_testing_ext._torch.torch_frames import (
    FUNCTIONS_WITH_PARTS,
    is_awaited_in_cpp,
    is_called_as,
    is_of_program,
    issuer_of,
    parts_of,
    program_frames,
)

from .faults_of_rank import FaultsOfRank
from .issued_call import Issued, Tensor
from .operation_checks import Check, inputs_of, outputs_of
from .result_samples import Place
from .sanitizer_log import NO_GROUP, LogWriter, text_of

# Groups that do not communicate, or whose ranks are threads with a log of their own.
_NOT_COMPARED = ("fake", "threaded")


class _CallForm(NamedTuple):
    """All that is written down of a call: calls of one form share their texts in the log. `timeout`: its own, in ms."""

    name: str
    group: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    op: int | None
    root: int | None
    peer: int | None
    tag: int | None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None
    timeout: int
    blocks: bool
    parts: tuple[str, ...]


class CallRecorder:
    """Hears of each operation of c10d from the hook. It keeps an error of its own, and raises it to the caller, too."""

    def __init__(self, log: LogWriter, checks: list[Check], without_data: bool = False):
        """`without_data`: compare groups and tensors without data, too."""
        self._log = log
        self._without_data = without_data
        self._checks = checks
        self._after = [check for check in checks if check.wants_results]
        # A signal's handler may issue a collective.
        self._lock = threading.RLock()
        self._groups: weakref.WeakKeyDictionary[Any, tuple[int, int, float | None]] = weakref.WeakKeyDictionary()
        self._known_groups = 0
        # By the fields of a `_CallForm`: to make one takes longer than to look it up.
        self._whats: dict[tuple[Any, ...], tuple[int, int, bytes | None]] = {}
        # Lines, by code and instruction: reading the table of lines takes longer than all else. The code is kept, or
        # else another one might get its id; it cannot always be hashed. No frame is kept: it would keep tensors alive.
        self._sites: dict[tuple[int, int], tuple[CodeType, int]] = {}
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
        blocks = blocks or (spec.is_p2p and is_called_as(spec.kind, issuer_of(kernel)))
        # Elsewhere, the rank is seen to wait.
        blocks = blocks or (self._without_data and is_awaited_in_cpp(issuer_of(kernel)))
        op = operation_hook.hook.reduce_op_of(spec, args)
        form = (spec.name, known[0], inputs, outputs, op, root, peer, tag, splits, timeout, blocks, parts)
        what = self._whats.get(form)
        if what is None:
            what = self._whats[form] = self._describe(spec, args, known, _CallForm(*form))
        return self._log.issue(*what, site), site, group

    def after(self, spec: OpSpec, known: tuple[int, int], args: tuple[Any, ...], result: Any) -> Any:
        other = None
        try:
            for check in self._after:
                replaced = check.after(spec, args, result, known[1], known[0])
                if replaced is not None:
                    result = other = replaced
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
        if not self.error and frames and not is_of_program(frames[-1].filename):
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
        """Whether a group has got a shorter time-out since it was first used."""
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
        form: _CallForm,
    ) -> tuple[int, int, bytes | None]:
        """The number of the group, or NO_GROUP for tensors without data, as those of a trace; that of the text; and
        what must agree, if the call is compared with those of all members."""
        number, size, timeout = known
        inputs, outputs = inputs_of(spec, args), outputs_of(spec, args)
        issued = Issued(
            kind=spec.kind,
            inputs=_described(inputs),
            outputs=_described(outputs if spec.outputs is not None else inputs),
            op=operation_hook.name_of_reduce_op(form.op),
            root=form.root,
            peer=form.peer,
            tag=form.tag or 0,
            splits=form.splits,
            size=size,
            timeout=form.timeout / 1000 if form.timeout > 0 else timeout,
            blocks=form.blocks,
            parts=form.parts,
        )
        all_agree = [issued.agreement(), issued.root, issued.layout(), form.parts]
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
        issuer = frame
        while frame is not None:
            code = frame.f_code
            if is_of_program(code.co_filename) and (self._is_known(frame) or not _runs_at_its_head(frame)):
                return self._number_of(frame), parts
            if code.co_name in FUNCTIONS_WITH_PARTS:
                parts = parts_of(frame) or parts
            frame = frame.f_back
        return self._number_of(self._frame(issuer)), parts

    def _is_known(self, frame: Any) -> bool:
        return (id(frame.f_code), frame.f_lasti) in self._sites

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

    def _frame(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame of the program; in a thread of torch, as for a callback, that of the main thread."""
        innermost = next(program_frames(frame), None)
        if innermost is None and threading.current_thread() is not threading.main_thread():
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            return next(program_frames(main), None)
        return innermost


def _runs_at_its_head(frame: Any) -> bool:
    """Whether the code was compiled for a whole function. Another caller may be on the way to it each time."""
    code = frame.f_code
    return frame.f_lineno == code.co_firstlineno and is_head_of_function(code.co_filename, frame.f_lineno)


def signature(value: Any) -> tuple[Any, ...]:
    """Describe a tensor, a list of tensors, or a list of lists, to be compared quickly."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.is_meta
    return tuple([signature(item) for item in value])


def _described(tensors: list[torch.Tensor]) -> tuple[Tensor, ...]:
    return tuple((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)
