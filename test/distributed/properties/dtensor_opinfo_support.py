"""Calls of operations on DTensors by value, and what torch is known to get wrong about them."""

import functools
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from dtensor_ops_support import ArgumentLayout
from known_versions import ALL, is_in
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Call:
    """A call of an operation: its name below `torch`, arguments, and placements for the tensors among them in turn."""

    title: str
    placements: tuple
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    must_answer = True  # it may not be refused by a torch that supports the operation

    @property
    def function(self):
        return functools.reduce(getattr, self.title.split("."), torch)

    @property
    def arguments(self):
        return self.args, self.kwargs

    @property
    def tensors(self):
        return [leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, torch.Tensor)]

    def layouts(self, mesh):
        """Return the layout of each tensor."""
        pairs = zip(self.tensors, self.placements, strict=True)
        return [ArgumentLayout(tuple(one.shape), tuple(mesh.shape), chosen) for one, chosen in pairs]

    def run(self, tensors):
        """Return the results as a list; of several containers, their items."""
        it = iter(tensors)
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda _: next(it), self.arguments)
        return [*pytree.tree_leaves(self.function(*args, **kwargs))]

    def __repr__(self):
        tensors = zip(self.tensors, self.placements, strict=True)
        shown = [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)} as {chosen}" for one, chosen in tensors]
        others = [leaf for leaf in pytree.tree_leaves(self.arguments) if not isinstance(leaf, torch.Tensor)]
        return f"{self.title}({', '.join([*shown, *map(repr, others)])})"


def partial_of(tensor):
    return ("sum",) if tensor.dtype.is_floating_point else ()


# -- what is known to be wrong


def is_distributed(layout):
    return any(not placement.is_replicate() for placement in layout.placements)


@dataclass(frozen=True)
class KnownFault:
    """Operations that are wrong if a tensor has such a layout. `page`: the file in docs/found.

    `titles` are patterns. `versions`: from the first version of torch up to, but excluding, the second.
    """

    page: str
    when: object
    titles: tuple
    versions: tuple = ALL

    def concerns(self, mesh, call):
        title = call.title.removeprefix("Tensor.")
        return (
            is_in(self.versions)
            and any(fnmatchcase(title, pattern) for pattern in self.titles)
            and any(map(self.when, call.layouts(mesh)))
        )


FLATTENING = ("flatten*", "nn.functional.linear*", "ravel*", "reshape*", "unfold*", "view*")

# test_found.py notices when torch corrects one.
KNOWN_FAULTS = (
    KnownFault(
        "amax_of_a_rank_without_elements",
        ArgumentLayout.leaves_a_rank_empty,
        (
            "amax",
            "amin",
            "argmax",
            "argmin",
            "cov",
            "linalg.norm",
            "linalg.vector_norm",
            "masked.argmax",
            "masked.argmin",
            "nn.functional.adaptive_max_pool1d",
            "nn.functional.adaptive_max_pool2d",
            "nn.functional.adaptive_max_pool3d",
            *(f"nn.functional.{kind}_pool{dims}d" for kind in ("avg", "max") for dims in (1, 2, 3)),
            "norm",
            "norm.inf",
        ),
    ),
    # It shards partial sums by itself.
    KnownFault("amax_of_a_rank_without_elements", ArgumentLayout.may_leave_a_rank_empty, ("aminmax",)),
    KnownFault(
        "convolution_of_sharded_weights",
        is_distributed,
        tuple(f"nn.functional.conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)),
    ),
    KnownFault(
        "fft_of_a_rank_without_rows",
        ArgumentLayout.may_leave_a_rank_empty,
        ("fft.*",),
        ((2, 12), (2, 15)),
    ),
    KnownFault(
        "flatten_of_a_dim_sharded_twice",
        ArgumentLayout.is_unevenly_sharded_twice,
        FLATTENING,
    ),
    KnownFault("fill_of_a_partial_sum", is_distributed, ("nn.functional.cosine_embedding_loss",)),
    KnownFault("item_of_a_rank_without_elements", ArgumentLayout.leaves_a_rank_empty, ("item",)),
    KnownFault("item_of_a_partial_sum", ArgumentLayout.is_partial, ("item",)),
    KnownFault(
        "mse_loss_of_uneven_shards",
        ArgumentLayout.may_become_uneven,
        (
            "nn.functional.binary_cross_entropy",
            "nn.functional.binary_cross_entropy_with_logits",
            "nn.functional.huber_loss",
            "nn.functional.mse_loss",
            "nn.functional.smooth_l1_loss",
            "nn.functional.soft_margin_loss",
        ),
    ),
    # These two need a sharded dim that may come about by redistribution only.
    KnownFault("argmax_of_columns", is_distributed, ("argmax", "argmin", "masked.argmax", "masked.argmin")),
    KnownFault("cross_product_of_broadcast_rows", is_distributed, ("cross", "linalg.cross"), ((2, 14), (99, 0))),
    KnownFault("embedding_rank_without_rows", is_distributed, ("nn.functional.embedding",)),
    KnownFault("cumsum_of_a_sharded_dim", is_distributed, ("cumprod", "cumsum", "logcumsumexp"), ((2, 0), (2, 14))),
)


def is_known_to_fail(mesh, call):
    return any(fault.concerns(mesh, call) for fault in KNOWN_FAULTS)


# -- what torch has not always answered

# The first version of torch that answers. Earlier ones lack the operation or a strategy for it, or do not redistribute.
ANSWERED_SINCE = {
    (2, 12): (
        "addr",
        "complex",
        "cross",
        "cummax",
        "diagonal_scatter",
        "fft.fftshift",
        "fft.ifftshift",
        "flatten",
        "flip",
        "fliplr",
        "gcd",
        "grid_sampler_3d",
        "index_reduce",
        "kron",
        "lcm",
        "linalg.cross",
        "linalg.det",
        "linalg.householder_product",
        "linalg.pinv",
        "linalg.slogdet",
        "linalg.solve_ex",
        "linalg.solve_triangular",
        "linalg.tensorinv",
        "linalg.tensorsolve",
        "linalg.vander",
        "lu_solve",
        "masked.cumprod",
        "masked.median",
        "matrix_exp",
        "mode",
        "native_batch_norm",
        "ne",
        "nn.functional.adaptive_avg_pool2d",
        "nn.functional.batch_norm",
        "nn.functional.cosine_similarity",
        "nn.functional.grid_sample",
        "nn.functional.instance_norm",
        "nn.functional.local_response_norm",
        "nn.functional.max_unpool1d",
        "nn.functional.max_unpool2d",
        "nn.functional.max_unpool3d",
    ),
    (2, 13): ("native_group_norm", "nn.functional.group_norm", "nn.functional.linear_cross_entropy"),
}


def may_be_refused(call):
    too_old = (titles for since, titles in ANSWERED_SINCE.items() if is_in(((0, 0), since)))
    return not call.must_answer or any(call.title in titles for titles in too_old)
