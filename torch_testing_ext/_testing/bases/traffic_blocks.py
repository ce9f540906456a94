"""The context manager `traffic`: the communication of a block of a test, as numbers for assertions."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_testing_ext._collectives.records.budgets import Budget, BudgetError, amounts_of, updated
from torch_testing_ext._collectives.records.issued_calls import Call, GroupRecord, RankRecord
from torch_testing_ext._collectives.records.rank_facts import Amount, RankFacts, Share, bytes_of, has_name
from torch_testing_ext._collectives.sanitizer.call_recorder import CallRecorder
from torch_testing_ext._collectives.sanitizer.operation_checks import Check
from torch_testing_ext._collectives.sanitizer.sanitizer_log import LogReader, LogWriter
from torch_testing_ext._process.locks import open_locked
from torch_testing_ext._testing.bases.block_uses import BlockUses, IssuedWorks, followed
from torch_testing_ext._torch.groups import dataless_groups, watched_groups
from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext._torch.operations.operation_hook import OpSpec
from torch_testing_ext._torch.replacing import replaced
from torch_testing_ext._torch.tensors import tensor_reads
from torch_testing_ext._torch.torch_frames import is_of_program, modules_of
from torch_testing_ext.launch import current_context
from torch_testing_ext.launch.aspects.budgets_of_tests import IS_UPDATED

# The methods by which a host waits for a value.
_WAITS = frozenset(("__bool__", "__float__", "__int__", "item", "tolist"))


class TrafficError(RuntimeError):
    """The traffic of a block cannot be measured."""


class SeenTraffic(RankFacts):
    """The communication of a block in this rank. It is complete when the block has ended."""

    def __init__(self) -> None:
        super().__init__(RankRecord(0, {}, {}, True, None))
        self._waits: Counter[str] = Counter()
        self._overlapped: frozenset[int] = frozenset()
        self._memory = 0
        self._is_over = False

    def end(self, record: RankRecord, observer: _Observer, uses: BlockUses) -> None:
        """The block has ended."""
        super().__init__(record, observer.modules)
        self._waits, self._overlapped, self._memory = observer.waits, uses.overlapped(), uses.most
        self._is_over = True

    def issued_in(self, group: str | None = None, op: str | None = None) -> Iterator[tuple[GroupRecord, Call]]:
        self._require_end()
        if group is not None and not any(has_name(known, group) for known in self.record.groups.values()):
            names = sorted({known.title for known in self.record.groups.values()})
            raise ValueError(
                f"this rank is in no group {group!r}; it is in {', '.join(names) or 'none'}. A mesh of one dimension "
                "over all ranks uses the default group, 'world'"
            )
        return super().issued_in(group, op)

    @property
    def host_waits(self) -> Amount:
        """The number of waits for values and devices: item(), tolist(), bool(), synchronize() and so on."""
        self._require_end()
        return Amount.at(self._waits)

    def overlapped(self, group: str | None = None, op: str | None = None) -> Share:
        """The part of the bytes of these calls that is on its way while the rank computes: from 0 to 1.

        It follows from the order of what is issued, and not from times: a call counts if the rank issues computation
        before it waits for it.
        """
        calls = list(self.issued(group, op))
        total = sum(map(bytes_of, calls))
        if not total:
            raise ValueError("the block issues no such call, which could overlap with computation")
        alone = [call for call in calls if call.order not in self._overlapped]
        share = Share(1 - sum(map(bytes_of, alone)) / total)
        places = Counter(f"{call.kind} at {self.place_of(call)}" for call in alone)
        share.lines = tuple(f"{number} without: {place}" for place, number in places.most_common())
        return share

    def memory(self) -> Amount:
        """The most bytes that the tensors which the block makes or uses have at once."""
        self._require_end()
        return Amount(self._memory)

    def between_nodes(self, group: str | None = None, op: str | None = None) -> Amount:
        """Add up the bytes that this rank handed over to calls in groups with members on several nodes."""
        context = current_context()
        return self.bytes_across(
            sys.maxsize if context is None else context.world_size // context.nodes.count, group, op
        )

    def within(self, path: str | os.PathLike[str]) -> None:
        """Compare with the budget in a file, or write that with --update-budgets. Raises AssertionError."""
        self._require_end()
        rank, size = _place_in_world()
        file, version = Path(path), _version()
        if IS_UPDATED.value():
            _update(file, version, size, rank, self)
            return
        difference = Budget.read(file).why_exceeded(rank, size, version, self)
        if difference:
            raise AssertionError(f"{difference}\n{file}: if this is intended, write it with --update-budgets")

    def _require_end(self) -> None:
        if not self._is_over:
            raise TrafficError("the block has not ended: ask after it")


def _version() -> str:
    """The release of torch that a budget is made with."""
    return ".".join(torch.__version__.split(".")[:2])


def _place_in_world() -> tuple[int, int]:
    context = current_context()
    if context is not None:
        return context.rank, context.world_size
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _update(file: Path, version: str, size: int, rank: int, facts: RankFacts) -> None:
    """Write the part of this rank. Ranks take turns, by a lock beside the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    context = current_context()
    folder = Path(tempfile.gettempdir()) if context is None else context.directory
    with open_locked(folder / f"{file.name}.lock", "a+"):
        before = None
        with suppress(BudgetError):
            before = Budget.read(file)
        text = updated(before, version, size, {rank: amounts_of(facts)}).text()
        written = file.with_name(f".{file.name}.{rank}")
        written.write_text(text, "utf-8")
        written.replace(file)


class _Observer(Check):
    """Notes, beside the recorder, for which module each call was issued, and where the host waits."""

    wants_results = True

    def __init__(self, model: nn.Module | None):
        names = [] if model is None else list(model.named_modules())
        self._names = {id(module): name for name, module in names if name}
        self._module = threading.local()
        self.modules: dict[int, str] = {}
        self.waits: Counter[str] = Counter()
        self.numbers: list[int] = []

    def before(self, spec: OpSpec, args: tuple[Any, ...], site: int, group: Any) -> None:
        running = modules_of(sys._getframe(1)) if self._names else iter(())
        names = (self._names.get(id(module), "") for module in running)
        self._module.name = next(filter(None, names), "")

    def after(self, spec: OpSpec, args: tuple[Any, ...], result: Any, site: int, number: int) -> None:
        self.numbers.append(number)
        if self._module.name:
            self.modules[number] = self._module.name

    # -- a listener of reads

    def on_read(self, method: str, tensor: torch.Tensor) -> None:
        frame: Any = sys._getframe(2)
        # torch itself reads numbers that are on the host anyway, such as the steps of optimizers.
        if method in _WAITS and (tensor.device.type != "cpu" or is_of_program(frame.f_code.co_filename)):
            self.waits[f"{method}() at {frame.f_code.co_filename}:{frame.f_lineno}"] += 1

    def on_alias(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """It has the same storage."""

    def synchronizing(self, name: str, method: Any) -> Any:
        """A function by which the host waits for a device, counted where the program calls it."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame: Any = sys._getframe(1)
            if is_of_program(frame.f_code.co_filename):
                self.waits[f"{name}() at {frame.f_code.co_filename}:{frame.f_lineno}"] += 1
            return method(*args, **kwargs)

        return call


class _BlockRecorder(CallRecorder):
    """Records the calls of a block."""


@contextmanager
def traffic(model: nn.Module | None = None) -> Iterator[SeenTraffic]:
    """Record the communication of this rank in the block, as numbers after its end.

        with traffic(model) as seen:
            step(model)
        assert seen.calls("dp", "all_reduce") == 6

    The names of modules are those in `model`. Raises TrafficError where nothing can be recorded.
    """
    why = operation_hook.can_hook()
    if why is not None:
        raise TrafficError(f"nothing can be recorded: {why}")
    hook = operation_hook.hook
    if any(isinstance(listener, _BlockRecorder) for listener in hook.listeners):
        raise TrafficError("blocks of traffic cannot be nested: end the one before")
    was_installed = hook.is_installed
    seen, observer, uses = SeenTraffic(), _Observer(model), BlockUses()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "traffic")
        recorder = _BlockRecorder(LogWriter(path), [observer, IssuedWorks(uses)], without_data=True)
        watched_groups.note_living_groups()
        recorder.note_groups()
        hook.tell(recorder)
        tensor_reads.listen_to_reads(observer)
        try:
            dataless_groups.issue_without_peers()
            with replaced("waits for devices", observer.synchronizing), followed(uses):
                yield seen
        finally:
            hook.leave(recorder)
            tensor_reads.stop_listening_to_reads(observer)
            if not was_installed:
                hook.remove()
        if recorder.error:
            raise TrafficError(f"the recorder failed:\n{recorder.error}")
        content = LogReader(path).read()
    if content is None or not content.is_whole:
        raise TrafficError("the block has issued more calls than a log has room for: record a shorter part")
    if not observer.numbers:
        raise TrafficError("the block's own call was not seen, so that nothing can be told of the others")
    seen.end(content.record(_place_in_world()[0]), observer, uses)
