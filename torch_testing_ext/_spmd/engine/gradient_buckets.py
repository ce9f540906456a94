"""Buckets of gradients, which travel as one flat tensor."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_testing_ext._torch.spmd import copy_all
from torch_testing_ext._utils.rank_traces import mark

from .bucket_plan import BucketProgress, bucket_limit, plan_buckets
from .managed_params import ManagedParam
from .wire import Wire

# Of a hash, each of which is one element: sums over ranks tell whether all have the same.
_BITS = 24
_MASK = 2**_BITS - 1


class GradientBucket:
    """Gradients of one dtype and device in one flat tensor. At its end are a flag and the bits of a hash."""

    def __init__(self, params: Sequence[ManagedParam]) -> None:
        self.params = tuple(params)
        self.nbytes = sum(managed.plain.nbytes for managed in params)
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        # The flag and the bits; their sums over ranks after the last wait.
        self._tail = torch.empty(0)
        self._sums = [0.0]
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
            tail = self._tail.real if self._tail.is_complex() else self._tail
            self._sums = tail.tolist()

    def flagged(self) -> bool:
        """Has any rank set the flag?"""
        return self._sums[0] != 0

    def hashes_agree(self, world: int) -> bool:
        """Have all ranks sent the same number?"""
        return {0.0, float(world)}.issuperset(self._sums[1:])

    def write_back(self, wanted: Callable[[ManagedParam], bool] | None = None) -> None:
        """Overwrite gradients with their means."""
        grads = []
        means = []
        for managed, mean in zip(self.params, self._views, strict=True):
            if wanted is not None and not wanted(managed):
                continue
            grad = _dense_gradient(managed, mean)
            if grad is not None:
                grads.append(grad)
                means.append(mean)
        copy_all(grads, means)

    def release(self) -> None:
        self._flat = None
        self._views = []
        self._tail = torch.empty(0)

    def _allocate(self) -> None:
        if self._flat is not None:
            return
        like = self.params[0].plain
        sizes = [managed.plain.numel() for managed in self.params]
        in_tail = 1 + _BITS
        self._flat = torch.empty(sum(sizes) + in_tail, dtype=like.dtype, device=like.device)
        *pieces, self._tail = self._flat.split([*sizes, in_tail])  # type: ignore[no-untyped-call]
        shapes = [managed.plain.shape for managed in self.params]
        self._views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _fill(self, scale: float) -> None:
        self._allocate()
        for managed, view in zip(self.params, self._views, strict=True):
            grad = managed.plain.grad
            if grad is None:
                view.zero_()
            else:
                dense = grad if grad.layout is torch.strided else grad.to_dense()
                torch.mul(dense, scale, out=view)
            if managed.kept is not None:
                # The rank's rows of a mean that the other ranks do not have.
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
        self.buckets = buckets
        self._numbers = numbers
        # With the backward.
        self.overlaps = True

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
        self.params = params
        self._limit = limit
        self._buckets: dict[tuple[int, ...], GradientBucket] = {}

    def plan(self, order: Sequence[int]) -> BackwardPlan:
        """Plan buckets for the parameters of these numbers."""
        plains = [self.params[number].plain for number in order]
        sizes = [plain.nbytes for plain in plains]
        kinds = [(plain.dtype, plain.device) for plain in plains]
        has_accelerator = bool(plains) and plains[0].device.type != "cpu"
        limit = self._limit or bucket_limit(sum(sizes), has_accelerator)
        numbers = []
        for positions in plan_buckets(sizes, kinds, limit):
            numbers.append(tuple([order[position] for position in positions]))
        return BackwardPlan(order, [self._bucket(of_bucket) for of_bucket in numbers], numbers)

    def _bucket(self, numbers: tuple[int, ...]) -> GradientBucket:
        if numbers not in self._buckets:
            self._buckets[numbers] = GradientBucket([self.params[number] for number in numbers])
        return self._buckets[numbers]

    def release(self) -> None:
        for bucket in self._buckets.values():
            bucket.release()
