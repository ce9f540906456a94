"""The context manager `traffic`: the communication of a block of a test, as numbers for assertions."""

from __future__ import annotations

import functools
import math
import os
import sys
import tempfile
import threading
import unittest
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_testing_ext._collectives.records.budgets import Budget, BudgetError, update
from torch_testing_ext._collectives.records.growth_laws import GrowthClaim
from torch_testing_ext._collectives.records.issued_calls import Call, GroupRecord, RankRecord
from torch_testing_ext._collectives.records.rank_facts import Amount, RankFacts, Share, bytes_of, has_name
from torch_testing_ext._collectives.sanitizer.call_recorder import CallRecorder
from torch_testing_ext._collectives.sanitizer.operation_checks import Check
from torch_testing_ext._collectives.sanitizer.sanitizer_log import LogReader, LogWriter
from torch_testing_ext._process.words import count, nearest
from torch_testing_ext._testing.bases.block_uses import BlockUses, IssuedWorks, followed
from torch_testing_ext._torch.groups import dataless_groups, made_groups, watched_groups
from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext._torch.operations.operation_hook import OpSpec
from torch_testing_ext._torch.replacing import replaced
from torch_testing_ext._torch.tensors import tensor_reads
from torch_testing_ext._torch.torch_frames import is_of_program, modules_of
from torch_testing_ext.launch import current_context
from torch_testing_ext.launch.account_writer import growth_claims
from torch_testing_ext.launch.aspects.budgets_of_tests import IS_UPDATED, UPDATED_SINCE
from torch_testing_ext.launch.aspects.growth import CLAIMS
from torch_testing_ext.launch.aspects.world import SIZE
from torch_testing_ext.launch.rank_context import context_here

# The methods by which a host waits for a value.
_WAITS = frozenset(("__bool__", "__float__", "__int__", "item", "tolist"))

# Places of unfinished calls that are named.
_MOST_PLACES = 5
# Facts of calls that may grow, in words.
_GROWING = {"calls": "calls", "bytes": "bytes", "between_nodes": "bytes between nodes"}


class TrafficError(RuntimeError):
    """The traffic of a block cannot be measured."""


class SeenTraffic(RankFacts):
    """The communication of a block in this rank. It is complete when the block has ended."""

    def __init__(self, test: str) -> None:
        super().__init__(RankRecord(0, {}, {}, True, None))
        self._test = test
        self._waits: Counter[str] = Counter()
        self._overlapped: frozenset[int] = frozenset()
        self._unfinished: frozenset[int] = frozenset()
        self._memory = 0
        self._is_over = False

    def end(self, record: RankRecord, observer: _Observer, uses: BlockUses) -> None:
        """The block has ended."""
        super().__init__(record, observer.modules)
        self._waits, self._overlapped, self._memory = observer.waits, uses.overlapped(), uses.most
        self._unfinished = uses.unfinished
        self._is_over = True

    def why_unfinished(self, calls: Iterable[Call]) -> str:
        """Name those among these calls for which the block does not wait; "" if there are none."""
        places = Counter(f"{call.kind} at {self.place_of(call)}" for call in calls if call.order in self._unfinished)
        if not places:
            return ""
        listed = "; ".join(f"{number} by {place}" for place, number in places.most_common(_MOST_PLACES))
        return (
            f"the block ends before {count(places.total(), 'call')} for which nobody in it waits ({listed}): "
            "whether such a call overlaps with computation is not known. Wait for it in the block"
        )

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
        why = self.why_unfinished(calls)
        if why:
            raise TrafficError(why)
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
        if CLAIMS.value() is not None:
            # A larger world, of which only the growth is asked.
            return
        if IS_UPDATED.value():
            update(file, UPDATED_SINCE.value(), self._test, size, version, rank, self)
            return
        budget = Budget.read(file)
        if SIZE.value() not in (None, budget.world_size):
            text = f"not compared: {file} is the budget of {count(budget.world_size, 'rank')}"
            warnings.warn(text, stacklevel=2)
            return
        try:
            difference = budget.why_exceeded(rank, size, version, self)
        except BudgetError as error:
            raise BudgetError(f"{file}: {error}") from None
        if difference:
            raise AssertionError(
                f"{file} is not kept:\n{difference}\nIf this is intended, write it with --update-budgets."
            )

    def grows(self, group: str | None, fact: str, op: str | None = None, *, at_most: float) -> None:
        """Claim that a number grows with the world by a law at most: the test runs in a world of twice the size, too.

            seen.grows("dp", "bytes", at_most=0)

        `fact`: "calls", "bytes", "between_nodes" or "memory". `at_most`: 0 if it must not grow, 1 if it may grow as the
        world does, -1 if it must shrink. When the test has passed, a whole world of twice the size runs it up to its
        last claim, without communication, and the test fails if the rank with most has more there than the law allows.
        """
        amount, what = self._amount_of(group, fact, op)
        if isinstance(at_most, bool) or not isinstance(at_most, (int, float)) or not math.isfinite(at_most):
            raise ValueError(f"at_most is {at_most!r}; it must be a number: 0 if the {fact} must not grow")
        context = context_here()
        if context is None or not context.account.is_read:
            raise TrafficError("growth is told of tests whose ranks are started by pytest, torchtest or unittest")
        growth_claims.append(GrowthClaim(what, float(at_most), int(amount), amount.lines))
        if len(growth_claims) == CLAIMS.value():
            raise unittest.SkipTest("all is told that was asked of a larger world")

    def _amount_of(self, group: str | None, fact: str, op: str | None) -> tuple[Amount, str]:
        """A fact by its name, and its name in a sentence."""
        if fact == "memory":
            if group is not None or op is not None:
                raise ValueError("memory is that of the whole block: name no group and no operation for it")
            return self.memory(), "bytes of memory"
        if fact not in _GROWING:
            raise ValueError(f"there is no growth of {fact!r}.{nearest(fact, (*_GROWING, 'memory'))}")
        amount: Amount = getattr(self, fact)(group, op)
        words = (_GROWING[fact], f"of {op}" if op else "", "" if group is None else f"in group {group!r}")
        return amount, " ".join(filter(None, words))

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


class _BlockRecorder(CallRecorder):
    """Records a block, also where nobody watches the groups that are made in it."""

    def _look_up(self, group: Any) -> tuple[int, int, float | None]:
        if made_groups.number_of_group(group) is None:
            watched_groups.note_living_groups()
            self.note_groups()
        return super()._look_up(group)


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


def traffic(model: nn.Module | None = None) -> AbstractContextManager[SeenTraffic]:
    """Record the communication of this rank in the block, as numbers after its end.

        with traffic(model) as seen:
            step(model)
        assert seen.calls("dp", "all_reduce") == 6

    The names of modules are those in `model`. Raises TrafficError where nothing can be recorded.
    """
    of_pytest = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return traffic_of(of_pytest or Path(sys.argv[0]).name, model)


@contextmanager
def traffic_of(test: str, model: nn.Module | None) -> Iterator[SeenTraffic]:
    """Record the communication of this rank in the block. `test`: the name of its test in budgets."""
    why = operation_hook.can_hook()
    if why is not None:
        raise TrafficError(f"nothing can be recorded: {why}")
    hook = operation_hook.hook
    if any(isinstance(listener, _BlockRecorder) for listener in hook.listeners):
        raise TrafficError("blocks of traffic cannot be nested: end the one before")
    was_installed = hook.is_installed
    seen, observer, uses = SeenTraffic(test), _Observer(model), BlockUses()
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
    unfinished = seen.why_unfinished(seen.issued())
    if unfinished:
        warnings.warn(unfinished, stacklevel=3)
