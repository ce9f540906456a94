"""Operations for the property suite of DTensor, with the known cases that torch refuses or gets wrong."""

import enum
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from known_versions import ALL, is_in

# -- operations by name. Each must give the same result for a DTensor as for the full tensor.

POINTWISE = {
    "abs": torch.abs,
    "add 1": lambda x: x + 1,
    "add_ 1": lambda x: x.clone().add_(1),
    "bitwise_and": lambda x: x.to(torch.int64) & 3,
    "clamp": lambda x: x.clamp(2, 9),
    "clone": torch.clone,
    "cos": torch.cos,
    "div 2": lambda x: x / 2,
    "dropout": lambda x: F.dropout(x, 0.0),
    "elu": F.elu,
    "eq": lambda x: x == 3,
    "erf": torch.erf,
    "exp": lambda x: torch.exp(-x),
    "floor": lambda x: torch.floor(x / 2),
    "full_like": lambda x: torch.full_like(x, 3),
    "gelu": F.gelu,
    "gt": lambda x: x > 3,
    "hardtanh": F.hardtanh,
    "isnan": torch.isnan,
    "leaky_relu": F.leaky_relu,
    "lerp": lambda x: torch.lerp(x, x * 2, 0.5),
    "log1p": torch.log1p,
    "logical_not": torch.logical_not,
    "masked_fill": lambda x: x.masked_fill(x > 3, 0.0),
    "mul 2": lambda x: x * 2,
    "mul_ 2": lambda x: x.clone().mul_(2),
    "nan_to_num": torch.nan_to_num,
    "neg": torch.neg,
    "ones_like": torch.ones_like,
    "pow": lambda x: x**3,
    "reciprocal": lambda x: torch.reciprocal(x + 1),
    "relu": torch.relu,
    "remainder": lambda x: x % 3,
    "round": lambda x: torch.round(x / 3),
    "rsqrt": lambda x: torch.rsqrt(x + 1),
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": F.silu,
    "sin": torch.sin,
    "softplus": F.softplus,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "sub from 1": lambda x: 1 - x,
    "tanh": torch.tanh,
    "threshold": lambda x: F.threshold(x, 3.0, 0.0),
    "to bfloat16": torch.Tensor.bfloat16,
    "to double": torch.Tensor.double,
    "to int": lambda x: x.to(torch.int64),
    "where": lambda x: torch.where(x > 3, x, -x),
    "zeros_like": torch.zeros_like,
}
OF_TWO = {
    "add": torch.add,
    "atan2": torch.atan2,
    "div": lambda x, y: x / (y + 1),
    "eq": torch.eq,
    "gt": torch.gt,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mul": torch.mul,
    "sub": torch.sub,
    "where": lambda x, y: torch.where(x > y, x, y),
}
REDUCTIONS = {
    "all": lambda x: torch.all(x > 0),
    "amax": torch.amax,
    "amax of a dim": lambda x: x.amax(-1),
    "amin": torch.amin,
    "any": lambda x: torch.any(x > 3),
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "count_nonzero": torch.count_nonzero,
    "cummax": lambda x: x.cummax(-1).values,
    "cumprod": lambda x: x.cumprod(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "kthvalue": lambda x: x.kthvalue(1, -1).values,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "max": torch.max,
    "max of a dim": lambda x: x.max(-1).values,
    "mean": torch.mean,
    "mean of a dim": lambda x: x.mean(0),
    "mean kept": lambda x: x.mean(-1, keepdim=True),
    "median": lambda x: x.median(-1).values,
    "min": torch.min,
    "min of a dim": lambda x: x.min(0).values,
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "nansum": torch.nansum,
    "norm": torch.linalg.vector_norm,
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "norm of a dim": lambda x: torch.linalg.vector_norm(x, dim=0),
    "prod": lambda x: torch.prod(1 + x / 64),
    "softmax": lambda x: x.softmax(-1),
    "softmax of the first dim": lambda x: x.softmax(0),
    "sort": lambda x: x.sort(-1).values,
    "std": lambda x: torch.std(x, correction=0),
    "sum": torch.sum,
    "sum of a dim": lambda x: x.sum(0),
    "sum of two dims": lambda x: x.sum((0, -1)) if x.dim() > 1 else x.sum(),
    "sum kept": lambda x: x.sum(-1, keepdim=True),
    "topk": lambda x: x.topk(1, -1).values,
    "var": lambda x: torch.var(x, correction=0),
    "var of a dim": lambda x: torch.var(x, -1, correction=0),
}
VIEWS = {
    "cat": lambda x: torch.cat([x, x], 0),
    "cat of the last dim": lambda x: torch.cat([x, x], -1),
    "chunk": lambda x: x.chunk(2, -1)[0],
    "contiguous": lambda x: x.transpose(0, -1).contiguous(),
    "diagonal": lambda x: x.diagonal(0, 0, -1) if x.dim() > 1 else x,
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "flatten": torch.flatten,
    "flip": lambda x: x.flip(0),
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "movedim": lambda x: x.movedim(0, -1),
    "narrow": lambda x: x.narrow(-1, 0, 1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "permute": lambda x: x.permute(*reversed(range(x.dim()))),
    "repeat": lambda x: x.repeat(*[1] * (x.dim() - 1), 2),
    "roll": lambda x: x.roll(1, -1),
    "select": lambda x: x.select(0, 0),
    "select of the last dim": lambda x: x[..., -1],
    "slice": lambda x: x[1:],
    "slice of every second": lambda x: x[..., ::2],
    "split": lambda x: x.split(2, -1)[0],
    "squeeze": torch.squeeze,
    "stack": lambda x: torch.stack([x, x]),
    "tile": lambda x: x.tile(2),
    "transpose": lambda x: x.transpose(0, -1),
    "tril": lambda x: x.tril() if x.dim() > 1 else x,
    "triu": lambda x: x.triu() if x.dim() > 1 else x,
    "unbind": lambda x: x.unbind(0)[0],
    "unflatten": lambda x: x.unflatten(-1, (1, -1)),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "view": lambda x: x.view(-1),
    "view_as": lambda x: x.view_as(x),
}


# -- the layout of an argument


@dataclass(frozen=True)
class ArgumentLayout:
    """The layout of an argument on the ranks: its shape, the mesh and the placements."""

    shape: tuple
    mesh: tuple
    placements: tuple

    def is_sharded(self, dim):
        return any(placement.is_shard(dim % len(self.shape)) for placement in self.placements)

    def is_partial(self):
        return any(placement.is_partial() for placement in self.placements)

    def parts(self, dim):
        """Return the sizes of the ranks' parts of a dim."""
        sizes = [self.shape[dim]]
        for ranks, placement in zip(self.mesh, self.placements, strict=True):
            if placement.is_shard(dim % len(self.shape)):
                sizes = [part for size in sizes for part in _chunks(size, ranks)]
        return sizes

    def is_uneven(self, dim):
        return len(set(self.parts(dim))) > 1

    def is_plain(self):
        """Is it simple enough for torch to act the same way each time?

        That takes one mesh dim, and no dim sharded into more parts than it has elements: otherwise torch often gathers
        first. Dims of size 1 are excluded, because operations add and remove them.
        """
        return len(self.mesh) == 1 and all(
            size > 1 and not (self.is_sharded(dim) and size < self.mesh[0]) for dim, size in enumerate(self.shape)
        )

    def may_become_uneven(self):
        """May any dim become uneven? That includes partial sums, which torch may turn into shards."""
        return any(size % math.prod(self.mesh) for size in self.shape)

    def leaves_a_rank_empty(self):
        return any(0 in self.parts(dim) for dim in range(len(self.shape)))

    def is_unevenly_sharded_twice(self):
        """Is a dim sharded by two mesh dims, and uneven?"""
        return any(
            sum(placement.is_shard(dim) for placement in self.placements) > 1 and self.is_uneven(dim)
            for dim in range(len(self.shape))
        )

    def may_leave_a_rank_empty(self):
        """May a rank become empty? That includes layouts that torch shards by itself."""
        return any(0 in _chunks(size, ranks) for size in self.shape for ranks in (*self.mesh, math.prod(self.mesh)))


def _chunks(size, ranks):
    each = -(-size // ranks)
    return [max(0, min(each, size - each * rank)) for rank in range(ranks)]


# -- known refusals and wrong results


class ExpectedResult(enum.Enum):
    """The result that torch must have for an operation."""

    ANSWER = "the right answer"
    REFUSAL = "a refusal"
    EITHER = "either: it depends on torch's cost model"


@dataclass(frozen=True)
class KnownIssue:
    """A refusal or a wrong result of torch. `message` is a pattern of its error, or the file in docs/found.

    `when`: for which plain layouts; None if we do not know. `versions`: from the first version of torch up to, but
    excluding, the second.
    """

    ops: tuple
    when: object
    message: str
    versions: tuple = ALL

    def concerns(self, op):
        return op in self.ops and is_in(self.versions)

    def expects(self, layout):
        if self.when is None or not layout.is_plain():
            return ExpectedResult.EITHER
        return ExpectedResult.REFUSAL if self.when(layout) else ExpectedResult.ANSWER


_UNEVEN = "would remove or reshape sharded dimension|Cannot (flatten|shard) unevenly"
_BEFORE_2_12 = ((2, 0), (2, 12))
# The first entry for an operation and a version is the one that holds.
REFUSALS = [
    KnownIssue(
        ("cummax", "cumprod", "flip", "kthvalue", "median", "nansum", "roll", "threshold"),
        lambda layout: True,
        "does not have a sharding strategy registered",
        _BEFORE_2_12,
    ),
    KnownIssue(("argmax", "argmin"), None, "Expected reduction dim to be|invalid size of output tensor", _BEFORE_2_12),
    KnownIssue(("max of a dim",), None, "Expected reduction dim .* to have non-zero size", _BEFORE_2_12),
    KnownIssue(("pad",), None, "list index out of range", _BEFORE_2_12),
    KnownIssue(("matmul of a batch and a matrix",), None, "Attempted to flatten", _BEFORE_2_12),
    # A rank without elements fails in its part of the reduction, while the others do not.
    KnownIssue(
        ("amax", "amin", "argmax", "argmin", "max", "min", "norm inf"),
        ArgumentLayout.leaves_a_rank_empty,
        "Expected reduction dim to be specified|cannot compute the inf norm",
    ),
    KnownIssue(
        ("amax of a dim",), lambda layout: 0 in layout.parts(-1), "Expected reduction dim -1 to have non-zero size"
    ),
    KnownIssue(("unbind",), lambda layout: layout.is_sharded(0), "Attempted to unbind along the sharded dimension"),
    KnownIssue(
        ("add_ 1",), ArgumentLayout.is_partial, "in-place operations that require placement changes", ((2, 14), (99, 0))
    ),
    # The op merges dims, which torch cannot do if any but the last is sharded unevenly.
    KnownIssue(
        ("flatten", "view"), lambda layout: any(layout.is_uneven(dim) for dim in range(len(layout.shape) - 1)), _UNEVEN
    ),
    KnownIssue(("squeeze",), lambda layout: False, _UNEVEN),
    KnownIssue(("matmul of a batch and a matrix",), lambda layout: layout.is_uneven(0), _UNEVEN),
]


def expected_result(op, layout):
    """Return the expected result, and the pattern of a refusal's message."""
    refusal = next((refusal for refusal in REFUSALS if refusal.concerns(op)), None)
    return (ExpectedResult.ANSWER, "") if refusal is None else (refusal.expects(layout), refusal.message)


# Wrong results of torch: each has a file in docs/found, and test_found.py notices when torch fixes one.
WRONG = [
    KnownIssue(
        ("cumprod", "cumsum"), lambda layout: layout.is_sharded(-1), "cumsum_of_a_sharded_dim", ((2, 0), (2, 14))
    ),
    KnownIssue(("argmax", "argmin"), lambda layout: layout.is_sharded(-1), "argmax_of_columns"),
    KnownIssue(("mse_loss",), ArgumentLayout.may_become_uneven, "mse_loss_of_uneven_shards"),
    KnownIssue(
        ("flatten", "view", "matmul of a batch and a matrix"),  # the last views a batch as one matrix
        ArgumentLayout.is_unevenly_sharded_twice,
        "flatten_of_a_dim_sharded_twice",
    ),
]


def is_known_to_be_wrong(op, layout):
    return any(wrong.concerns(op) and wrong.when(layout) for wrong in WRONG)
