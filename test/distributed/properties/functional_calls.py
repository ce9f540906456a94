"""Functional collectives and groups with options, with what a model of all ranks in one says of them."""

import functools
import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

REDUCTIONS = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}
# Before torch 2.13, two functions have another name, all_reduce has no gradient, and new_group always sorts the ranks.
OLD = torch.__version__ < (2, 13)
# Before torch 2.12, gathering and scattering take contiguous tensors only.
ONLY_CONTIGUOUS = torch.__version__ < (2, 12)
SUFFIX, COALESCED = ("tensor", "into_tensor") if OLD else ("single", "single")


@dataclass(frozen=True)
class Call:
    """A functional collective with its arguments."""

    op: str
    shape: tuple[int, ...]
    dim: int = 0
    reduce: str = "sum"
    root: int = 0  # in a permutation: how far each rank sends
    splits: tuple[tuple[int, ...], ...] = ()  # how many rows each rank sends to each
    transposed: bool = False

    @property
    def axis(self):
        return self.dim % len(self.shape)

    def input(self, rank, size, number=0):
        """Return what a member of the group passes in."""
        shape = list(self.shape)
        if self.op == "reduce_scatter":
            shape[self.axis] *= size
        elif self.op == "all_to_all":
            shape[0] = sum(self.splits[rank][:size])
        elif self.op == "permute":
            shape = [math.prod(shape)]
        numbers = torch.arange(math.prod(shape), dtype=torch.double)
        values = ((numbers * 5 + rank * 3 + number) % 7 - 3) / 2
        if self.transposed and not ONLY_CONTIGUOUS:
            return values.reshape(shape[::-1]).permute(*range(len(shape))[::-1])
        return values.reshape(shape)

    def expected(self, inputs):
        """Return what each member gets."""
        size = len(inputs)
        match self.op:
            case "all_reduce":
                return [functools.reduce(REDUCTIONS[self.reduce], inputs)] * size
            case "reduce_scatter":
                return functools.reduce(REDUCTIONS[self.reduce], inputs).tensor_split(size, self.axis)
            case "all_gather":
                return [torch.cat(inputs, self.axis)] * size
            case "all_to_all":
                parts = [one.split(row[:size]) for one, row in zip(inputs, self.splits, strict=False)]
                return [torch.cat([part[rank] for part in parts]) for rank in range(size)]
            case "broadcast":
                return [inputs[self.root % size]] * size
        return [inputs[(rank - self.root) % size] for rank in range(size)]

    def run(self, mine, group, rank, size):
        end = "_autograd" if mine.requires_grad else ""
        match self.op:
            case "all_reduce":
                return functional.all_reduce(mine, self.reduce, group)
            case "reduce_scatter":
                return getattr(functional, f"reduce_scatter_{SUFFIX}{end}")(mine, self.reduce, self.axis, group)
            case "all_gather":
                return getattr(functional, f"all_gather_{SUFFIX}{end}")(mine, self.axis, group)
            case "all_to_all":
                received, sent = [row[rank] for row in self.splits[:size]], list(self.splits[rank][:size])
                return getattr(functional, f"all_to_all_single{end}")(mine, received, sent, group)
            case "broadcast":
                return functional.broadcast(mine, self.root % size, group)
        return functional.permute_tensor(mine, [(one + self.root) % size for one in range(size)], group)

    def run_coalesced(self, tensors, group):
        match self.op:
            case "all_reduce":
                return functional.all_reduce_coalesced(tensors, self.reduce, group)
            case "reduce_scatter":
                dims = [self.axis] * len(tensors)
                run = getattr(functional, f"reduce_scatter_{SUFFIX}_coalesced")
                return run(tensors, self.reduce, dims, group)
        return getattr(functional, f"all_gather_{COALESCED}_coalesced")(tensors, group)


@dataclass(frozen=True)
class GroupOptions:
    """The arguments of new_group."""

    ranks: tuple[int, ...]
    description: str | None = None
    sort: bool = False

    def create(self):
        options = {} if OLD else {"sort_ranks": self.sort}
        return dist.new_group(
            list(self.ranks),
            timeout=timedelta(seconds=60),
            backend="gloo",
            group_desc=self.description,
            **options,
        )

    @property
    def members(self):
        return sorted(self.ranks) if self.sort or OLD else list(self.ranks)
