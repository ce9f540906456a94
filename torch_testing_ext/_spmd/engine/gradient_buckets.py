"""Buckets of gradients, which travel as one flat tensor."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_testing_ext._torch.spmd import copy_all
from torch_testing_ext._utils.rank_traces import mark

from .bucket_plan import BucketProgress, bucket_limit, plan_buckets
from .managed_params import ManagedParam
from .wire import Wire

_BITS = 24  # of a hash, each of which is one element: sums over ranks tell whether all have the same

_MASK = 2**_BITS - 1


class GradientBucket:
    """Gradients of one dtype and device in one flat tensor. At its end are a flag and the bits of a hash."""

    def __init__(self, params: Sequence[ManagedParam]) -> None:
        self.params = tuple(params)
        self.nbytes = sum(managed.plain.nbytes for managed in params)
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._tail, self._told = torch.empty(0), [0.0]
        self._work: Any = None

    def start(self, wire: Wire, flag: bool, number: int = 0) -> None:
        """Start to average the gradients as they are now."""
        self._fill(1 / wire.world)
        self._start(wire, flag, number)

    def start_empty(self, wire: Wire, number: int) -> None:
        """Take part in a collective of this shape, without gradients."""
        self._allocate()
        self._start(wire, False, number)

    def _start(self, wire: Wire, flag: bool, number: int) -> None:
        assert self._flat is not None
        if flag or number:
            self._tail.copy_(torch.tensor([float(flag), *bits(number)]))
        else:
            self._tail.zero_()
        self._work = wire.add(self._flat)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._told = (self._tail.real if self._tail.is_complex() else self._tail).tolist()

    def flagged(self) -> bool:
        """Whether any rank has set the flag."""
        return self._told[0] != 0

    def hashes_agree(self, world: int) -> bool:
        """Whether all ranks have sent the same number."""
        return {0.0, float(world)}.issuperset(self._told[1:])

    def write_back(self, wanted: Callable[[ManagedParam], bool] | None = None) -> None:
        """Overwrite gradients with their means."""
        pairs = zip(self.params, self._views, strict=True)
        some = [(m, view) for m, view in pairs if wanted is None or wanted(m)]
        copied = [(grad, view) for m, view in some if (grad := _dense_gradient(m, view)) is not None]
        copy_all([grad for grad, _ in copied], [view for _, view in copied])

    def release(self) -> None:
        self._flat, self._views, self._tail = None, [], torch.empty(0)

    def _allocate(self) -> None:
        if self._flat is None:
            like = self.params[0].plain
            sizes = [managed.plain.numel() for managed in self.params]
            self._flat = torch.empty(sum(sizes) + 1 + _BITS, dtype=like.dtype, device=like.device)
            *pieces, self._tail = self._flat.split([*sizes, 1 + _BITS])  # type: ignore[no-untyped-call]
            self._views = [piece.view(m.plain.shape) for m, piece in zip(self.params, pieces, strict=True)]

    def _fill(self, scale: float) -> None:
        self._allocate()
        for managed, view in zip(self.params, self._views, strict=True):
            grad = managed.plain.grad
            if grad is None:
                view.zero_()
            else:
                torch.mul(grad if grad.layout is torch.strided else grad.to_dense(), scale, out=view)
            if managed.kept is not None:  # the rank's rows of a mean that the other ranks do not have
                managed.rows(view).add_(managed.kept)


def bits(number: int) -> list[float]:
    """The lowest bits of a number, each as 0 or 1. Hashes of two calls differ, so that a collision lasts one call."""
    return [*map(float, f"{number & _MASK:0{_BITS}b}")]


def _dense_gradient(managed: ManagedParam, mean: torch.Tensor) -> torch.Tensor | None:
    """The gradient into which a mean is to be copied, unless it has been set here."""
    managed.kept = None
    plain = managed.plain
    grad = plain.grad
    if grad is None or grad.is_conj() or grad.is_neg():  # torch's optimizers refuse a lazy conjugate
        plain.grad = torch.empty_like(plain).copy_(mean)
    elif grad.layout is torch.strided:
        return grad  # type: ignore[no-any-return]
    else:
        plain.grad = mean.to_sparse(grad.sparse_dim())
    return None


class BackwardPlan:
    """The gradients that one backward of a call averages, in buckets, in the order in which they are expected."""

    def __init__(
        self, order: Sequence[int], buckets: Sequence[GradientBucket], numbers: Sequence[Sequence[int]]
    ) -> None:
        self.expected = frozenset(order)
        self.buckets, self._numbers = buckets, numbers
        self.overlaps = True  # with the backward

    def progress(self) -> BucketProgress:
        return BucketProgress.of(self._numbers)

    def start(self, wire: Wire, number: int, flag: bool, told: int) -> None:
        """Start one bucket, which also carries a flag and a number."""
        with mark(f"start bucket {number}", self.buckets[number].nbytes):
            self.buckets[number].start(wire, flag, told)

    def wait(self) -> None:
        for number, bucket in enumerate(self.buckets):
            with mark(f"wait for bucket {number}", bucket.nbytes):
                bucket.wait()

    def write_back(self, wanted: Callable[[ManagedParam], bool] | None = None) -> None:
        """Overwrite gradients, by default all, with their means."""
        for number, bucket in enumerate(self.buckets):
            with mark(f"write back bucket {number}", bucket.nbytes):
                bucket.write_back(wanted)


class BucketStore:
    """Makes buckets of the parameters of a roster. Plans with the same bucket share its memory."""

    def __init__(self, params: Sequence[ManagedParam], limit: int | None) -> None:
        self.params, self._limit = params, limit
        self._buckets: dict[tuple[int, ...], GradientBucket] = {}

    def plan(self, order: Sequence[int]) -> BackwardPlan:
        """Plan buckets for the parameters of these numbers."""
        plains = [self.params[i].plain for i in order]
        sizes = [plain.nbytes for plain in plains]
        limit = self._limit or bucket_limit(sum(sizes), bool(plains) and plains[0].device.type != "cpu")
        kinds = [(plain.dtype, plain.device) for plain in plains]
        numbers = [tuple([order[i] for i in bucket]) for bucket in plan_buckets(sizes, kinds, limit)]
        return BackwardPlan(order, [self._bucket(some) for some in numbers], numbers)

    def _bucket(self, numbers: tuple[int, ...]) -> GradientBucket:
        if numbers not in self._buckets:
            self._buckets[numbers] = GradientBucket([self.params[i] for i in numbers])
        return self._buckets[numbers]

    def release(self) -> None:
        for bucket in self._buckets.values():
            bucket.release()
