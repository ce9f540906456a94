"""Gradients travel in buckets, which are sent while a backward goes on."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._torch.training import copy_all, holders_of_memory, version_of

from .agreement import StepMeeting
from .layout import as_real
from .resting_tensor import AwayParameter

_MIB = 2**20


def dense(grad: torch.Tensor) -> torch.Tensor:
    """The values of a gradient, as dense real numbers."""
    return as_real(grad if grad.layout is torch.strided else grad.to_dense())


def is_kept(grad: torch.Tensor | None) -> bool:
    """Whether a gradient has to stay where it is: something besides autograd has made it, and may keep it."""
    if grad is None:
        return False
    return grad.layout is not torch.strided or version_of(grad) > 0 or holders_of_memory(grad) > 1


class Bucket:
    """Gradients of one dtype and device. The element after them flags that a rank has more to average.

    `frees`: gradients are freed when they leave. What a backward adds to them afterwards is averaged at its end.
    """

    def __init__(self, indices: Sequence[int], params: Sequence[torch.Tensor], frees: bool) -> None:
        self.indices, self.params, self.frees = indices, params, frees
        self.missing = 0
        self.flat = torch.empty(0)
        self._work: Any = None

    def _views(self) -> Iterator[torch.Tensor]:
        """The part of each gradient, as real numbers."""
        likes = [as_real(param) for param in self.params]
        parts = self.flat[:-1].split([like.numel() for like in likes])  # type: ignore[no-untyped-call]
        return (part.view(like.shape) for part, like in zip(parts, likes, strict=True))

    def start(self, meeting: StepMeeting, flag: bool) -> None:
        """Send the gradients. A parameter without one counts as zeros."""
        likes = [as_real(param) for param in self.params]
        self.flat = likes[0].new_empty(sum(like.numel() for like in likes) + 1)
        targets, grads = [], []
        for param, view in zip(self.params, self._views(), strict=True):
            if param.grad is None or (self.frees and is_kept(param.grad)):
                view.zero_()
            else:
                targets.append(view)
                grads.append(dense(param.grad))
                if self.frees:
                    param.grad = None
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
        """Let gradients that any rank has reached be their means. What is left to average keeps its own values."""
        targets, means = [], []
        for index, param, view in zip(self.indices, self.params, self._views(), strict=True):
            if index not in order or (index in left and not self.frees):
                continue
            grad = param.grad
            mean = torch.view_as_complex(view) if param.is_complex() else view
            if grad is None or grad.is_conj() or grad.is_neg():
                # torch's optimizers refuse a lazy conjugate.
                mean = mean if grad is None or not self.frees else mean + grad
                param.grad = torch.empty_like(param).copy_(mean)
            elif grad.layout is not torch.strided:
                sparse = mean.clone().to_sparse(grad.sparse_dim())
                param.grad = grad + sparse if self.frees else sparse
            elif self.frees:
                grad.add_(mean)
            else:
                targets.append(as_real(grad))
                means.append(view)
        copy_all(targets, means)
        self.flat = torch.empty(0)


class BucketPlan:
    """The buckets of one backward, and the gradients that it is expected to reach: the same on every rank."""

    def __init__(
        self,
        order: Sequence[int],
        params: Sequence[torch.Tensor],
        frees: Sequence[bool],
        limit: int | None,
    ) -> None:
        """`params` are those of `order`, and `frees` tells whose gradients are freed when they leave."""
        self.expected = frozenset(order)
        self.params = params
        self.kinds = [(param.shape, param.dtype, param.device) for param in params]
        numbers = [(index, *param.shape, param.element_size()) for index, param in zip(order, params, strict=True)]
        self.hash = hash((tuple(numbers), tuple(frees))) % (1 << 62)
        kinds = [(param.dtype, param.device, is_freed) for param, is_freed in zip(params, frees, strict=True)]
        sizes = [param.nbytes for param in params]
        self.buckets = [
            Bucket([order[place] for place in places], [params[place] for place in places], frees[places[0]])
            for places in positions_of_buckets(sizes, kinds, limit or _limit(sum(sizes), params))
        ]
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}
        # The next bucket to start.
        self.next = 0

    def fits(self) -> bool:
        """Whether the parameters are in this call, and still have the shapes and dtypes of the plan."""
        return all(
            type(param) is not AwayParameter and (param.shape, param.dtype, param.device) == kind
            for param, kind in zip(self.params, self.kinds, strict=True)
        )

    def begin(self) -> None:
        """Begin a backward."""
        self.next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.indices)

    def arrive(self, index: int, meeting: StepMeeting) -> None:
        """Note a gradient, and start the buckets that are full, but the last, which carries the flag."""
        self.bucket_of[index].missing -= 1
        while self.next < len(self.buckets) - 1 and not self.buckets[self.next].missing:
            if self.next == 0:
                meeting.check()
            self.buckets[self.next].start(meeting, False)
            self.next += 1

    def finish(self, meeting: StepMeeting, flag: bool) -> bool:
        """Start what is left, and wait for all. Returns whether any rank has set the flag."""
        while self.next < len(self.buckets):
            self.buckets[self.next].start(meeting, flag and self.next == len(self.buckets) - 1)
            self.next += 1
        flags = [bucket.finish() for bucket in self.buckets]
        return any(flags)

    def write_back(self, order: Collection[int], left: Collection[int]) -> None:
        """Let the gradients that any rank has reached be their means."""
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
