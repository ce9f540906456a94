"""Gradients travel in buckets: those of replicated parameters whole, rows of others to the rank that has them."""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._torch.training import copy_all

from .agreement import StepMeeting
from .layout import Rows, as_real
from .resting_tensor import AwayParameter
from .row_tensor import RowTensor, RowTensors

_MIB = 2**20


def dense(grad: torch.Tensor) -> torch.Tensor:
    """The values of a gradient, as dense real numbers."""
    return as_real(grad if grad.layout is torch.strided else grad.to_dense())


class Bucket:
    """Gradients of one dtype and device. The element after them flags that a rank has more to average."""

    def __init__(self, indices: Sequence[int], params: Sequence[torch.Tensor]) -> None:
        self.indices, self.params = indices, params
        like = as_real(params[0])
        sizes = [as_real(param).numel() for param in params]
        self.flat = like.new_zeros(sum(sizes) + 1)
        parts = self.flat[:-1].split(sizes)  # type: ignore[no-untyped-call]
        self.views = [part.view(as_real(param).shape) for part, param in zip(parts, params, strict=True)]
        self.missing = 0
        self._work: Any = None

    def start(self, meeting: StepMeeting, flag: bool) -> None:
        """Send the gradients. A parameter without one counts as zeros."""
        targets, grads = [], []
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is None:
                view.zero_()
            else:
                targets.append(view)
                grads.append(dense(param.grad))
        copy_all(targets, grads)
        self.flat[-1] = meeting.world if flag else 0
        # Before the sum, which float16 may not hold.
        self.flat.div_(meeting.world)
        self._work = dist.all_reduce(self.flat, group=meeting.group, async_op=True)

    def finish(self) -> bool:
        """Wait. Returns whether any rank has set the flag."""
        self._work.wait()
        self._work = None
        return bool(self.flat[-1])

    def write_back(self, order: Collection[int], left: Collection[int]) -> None:
        """Overwrite gradients that any rank has reached with their means, unless something is left to average."""
        targets, means = [], []
        for index, param, view in zip(self.indices, self.params, self.views, strict=True):
            if index not in order or index in left:
                continue
            grad = param.grad
            mean = torch.view_as_complex(view) if param.is_complex() else view
            if grad is not None and grad.layout is not torch.strided:
                param.grad = mean.clone().to_sparse(grad.sparse_dim())
            elif grad is None or grad.is_conj() or grad.is_neg():
                # torch's optimizers refuse a lazy conjugate.
                param.grad = torch.empty_like(param).copy_(mean)
            else:
                targets.append(as_real(grad))
                means.append(view)
        copy_all(targets, means)


class RowBucket:
    """Gradients of which each rank gets the means of its rows. They are freed when they leave."""

    def __init__(
        self, indices: Sequence[int], params: Sequence[torch.Tensor], rows: Sequence[Rows], gradients: RowTensors
    ) -> None:
        self.indices, self.params, self.rows, self.gradients = indices, params, rows, gradients
        self.widths = [of_param.width(as_real(param)) for of_param, param in zip(rows, params, strict=True)]
        self.missing = 0
        # The gradients that are to get the means.
        self._waiting: list[RowTensor | None] = []
        # What is sent, and what comes: a row from each rank for each.
        self._parts = self._received = torch.empty(0)
        # The rows of this rank, each in memory of its own: some live longer than others.
        self._means: list[torch.Tensor] = []
        self._work: Any = None

    def start(self, meeting: StepMeeting, flag: bool) -> None:
        """Send the gradients, and free them. A parameter without one counts as zeros."""
        like = as_real(self.params[0])
        shape = meeting.world, sum(self.widths) + 1
        parts = like.new_empty(shape)
        self._waiting = []
        columns = parts[:, :-1].split(self.widths, 1)  # type: ignore[no-untyped-call]
        for param, rows, into in zip(self.params, self.rows, columns, strict=True):
            gradient, taken = self.gradients.take(param, rows)
            self._waiting.append(gradient)
            if taken is None:
                into.zero_()
            else:
                rows.pack(dense(taken), into)
        parts[:, -1] = flag
        self._parts, self._received = parts, torch.empty_like(parts)
        self._work = dist.all_to_all_single(self._received.view(-1), parts.view(-1), group=meeting.group, async_op=True)

    def finish(self) -> bool:
        """Wait, sum what has come, and free what was sent. Returns whether any rank has set the flag."""
        self._work.wait()
        columns = self._received.split([*self.widths, 1], 1)  # type: ignore[no-untyped-call]
        *self._means, flag = [column.sum(0) for column in columns]
        self._parts = self._received = torch.empty(0)
        self._work = None
        return bool(flag)

    def write_back(self, order: Collection[int], left: Collection[int]) -> None:
        """Add the means to the rows of gradients that any rank has reached."""
        places = zip(self.indices, self.params, self.rows, self._means, self._waiting, strict=True)
        for index, param, rows, mean, gradient in places:
            if index in order:
                local = rows.of(as_real(param))
                mean = mean[: local.numel()].view(local.shape)
                mean = torch.view_as_complex(mean) if param.is_complex() else mean
                self.gradients.give(param, rows, mean, gradient)
        self._means, self._waiting = [], []


class BucketPlan:
    """The buckets of one backward, and the gradients that it is expected to reach: the same on every rank."""

    def __init__(
        self,
        order: Sequence[int],
        params: Sequence[torch.Tensor],
        rows: Sequence[Rows | None],
        gradients: RowTensors,
        limit: int | None,
    ) -> None:
        """`params` and `rows` are those of `order`; `rows` is None for a gradient that stays whole."""
        self.expected = frozenset(order)
        self.params = params
        self.kinds = [(param.shape, param.dtype, param.device) for param in params]
        numbers = [(index, *param.shape, param.element_size()) for index, param in zip(order, params, strict=True)]
        self.hash = hash((tuple(numbers), tuple(of_param is not None for of_param in rows))) % (1 << 62)
        kinds = [(param.dtype, param.device, row is None) for param, row in zip(params, rows, strict=True)]
        sizes = [param.nbytes for param in params]
        self.buckets: list[Bucket | RowBucket] = []
        for places in positions_of_buckets(sizes, kinds, limit or _limit(sum(sizes), params)):
            indices, members = [order[place] for place in places], [params[place] for place in places]
            of_bucket = [row for row in (rows[place] for place in places) if row is not None]
            if of_bucket:
                self.buckets.append(RowBucket(indices, members, of_bucket, gradients))
            else:
                self.buckets.append(Bucket(indices, members))
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}
        # The next bucket to start, and the first that is not over.
        self.next = self.unfinished = 0
        self.flagged = False

    def fits(self) -> bool:
        """Whether the parameters are in this call, and still have the shapes and dtypes of the plan."""
        return all(
            type(param) is not AwayParameter and (param.shape, param.dtype, param.device) == kind
            for param, kind in zip(self.params, self.kinds, strict=True)
        )

    def begin(self) -> None:
        """Begin a backward."""
        self.next = self.unfinished = 0
        self.flagged = False
        for bucket in self.buckets:
            bucket.missing = len(bucket.indices)

    def arrive(self, index: int, meeting: StepMeeting) -> None:
        """Note a gradient, and start the buckets that are full, but the last, which carries the flag."""
        self.bucket_of[index].missing -= 1
        while self.next < len(self.buckets) - 1 and not self.buckets[self.next].missing:
            if self.next == 0:
                meeting.check()
            self._start(meeting, False)

    def finish(self, meeting: StepMeeting, flag: bool) -> bool:
        """Start what is left, and wait for all. Returns whether any rank has set the flag."""
        while self.next < len(self.buckets):
            self._start(meeting, flag and self.next == len(self.buckets) - 1)
        while self.unfinished < len(self.buckets):
            self._finish_one()
        return self.flagged

    def _start(self, meeting: StepMeeting, flag: bool) -> None:
        # Two buckets of rows are on their way at a time: others would keep their memory.
        if self.next - self.unfinished >= 2 and isinstance(self.buckets[self.next], RowBucket):
            self._finish_one()
        self.buckets[self.next].start(meeting, flag)
        self.next += 1

    def _finish_one(self) -> None:
        self.flagged |= self.buckets[self.unfinished].finish()
        self.unfinished += 1

    def write_back(self, order: Collection[int], left: Collection[int]) -> None:
        """Let the gradients that any rank has reached be means. Of those that are left, only what has been sent."""
        for bucket in self.buckets:
            bucket.write_back(order, left)


def _limit(total: int, params: Sequence[torch.Tensor]) -> int:
    """The largest size of a bucket in bytes: a quarter of all, within bounds."""
    has_accelerator = bool(params) and params[0].device.type != "cpu"
    return min(max(total // 4, _MIB), (25 if has_accelerator else 8) * _MIB)


def positions_of_buckets(sizes: Sequence[int], kinds: Sequence[Hashable], limit: int) -> list[list[int]]:
    """Put positions 0, 1, ... into buckets of one kind and of at most `limit` bytes, unless a single one has more.

    The buckets are in the order in which they are complete if gradients come one after the other.
    """
    growing: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    buckets: list[list[int]] = []
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if kind not in growing or filled[kind] + size > limit:
            growing[kind], filled[kind] = [], 0
            buckets.append(growing[kind])
        growing[kind].append(position)
        filled[kind] += size
    return sorted(buckets, key=lambda bucket: bucket[-1])


def agreed_order(places: Sequence[Sequence[int]]) -> list[int]:
    """The gradients that any rank has reached, in the order of the first rank that reached each.

    `places` has a row for each rank: for each parameter 1 + its place in the rank's backward, or 0.
    """
    keys: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(places):
        for index, place in enumerate(row):
            if place:
                # Places on different ranks are comparable: they are the distance from the loss.
                keys.setdefault(index, (place, rank))
    return sorted(keys, key=lambda index: (*keys[index], index))
