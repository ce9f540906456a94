"""Operations and sample inputs of torch's own OpInfo database, and what is known to be wrong with them on DTensors."""

import functools
import itertools
import random
from dataclasses import dataclass

import torch
from dtensor_ops_support import ArgumentLayout
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from torch_testing_ext._machine.cuda import answering_for_torch
from torch_testing_ext.hypothesis_utils import MeshPlan, assume, device_meshes, placements

with answering_for_torch():  # the table's import would initialise CUDA, and ranks could no longer be forked
    from torch.testing._internal.common_methods_invocations import op_db

SAMPLES = 8  # of each operation
LARGEST = 20_000  # elements of a sample
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool)

# -- what is left out

# Results that differ from call to call, or that are not unique.
RANDOM = [
    "bernoulli",
    "cauchy",
    "empty",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.feature_alpha_dropout",
    "nn.functional.fractional_max_pool",
    "nn.functional.rrelu",
    "normal",
    "pca_lowrank",
    "rand",
    "svd_lowrank",
    "uniform",
    "new_empty",
]
AMBIGUOUS = ["eig", "geqrf", "linalg.eig", "linalg.qr", "linalg.svd", "ormqr", "qr", "svd"]
# From torch 2.13 on, one call takes minutes (docs/found/endless_search_for_attention.py).
ENDLESS = (
    "nn.functional.scaled_dot_product_attention",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
)


def title_of(info):
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def dtype_of(info):
    return next((dtype for dtype in DTYPES if dtype in info.dtypes), None)


OPERATIONS = {
    title_of(info): info
    for info in op_db
    if dtype_of(info) is not None and not info.name.startswith((*RANDOM, *AMBIGUOUS, *ENDLESS))
}


# -- samples


@dataclass(frozen=True)
class Sample:
    """One sample of an operation: its tensors, and what else it is called with."""

    tensors: tuple
    others: tuple
    structure: object

    def call(self, operation, tensors):
        it = iter(tensors)
        leaves = [next(it) if other is TENSOR else other for other in self.others]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return [*pytree.tree_leaves(operation(first, *args, **kwargs))]


TENSOR = object()  # the place of a tensor


@functools.cache
def samples_of(title):
    """Return samples of an operation, the same ones in every rank."""
    info = OPERATIONS[title]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = itertools.islice(info.sample_inputs("cpu", dtype_of(info), requires_grad=False), SAMPLES)
        samples = [sample_of(each) for each in found]
    return [each for each in samples if each.tensors and all(map(can_be_placed, each.tensors))]


def sample_of(drawn):
    leaves, structure = pytree.tree_flatten((drawn.input, drawn.args, drawn.kwargs))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return Sample(tensors, tuple(TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves), structure)


def can_be_placed(tensor):
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() <= LARGEST


@dataclass(frozen=True)
class Call:
    """An operation, the number of its sample, and placements for the sample's tensors."""

    title: str
    number: int
    placements: tuple

    @property
    def sample(self):
        return samples_of(self.title)[self.number]

    def layouts(self, mesh):
        """Return the layout of each tensor."""
        pairs = zip(self.sample.tensors, self.placements, strict=True)
        return [ArgumentLayout(tuple(one.shape), tuple(mesh.shape), chosen) for one, chosen in pairs]

    def run(self, tensors):
        """Return the results as a list; of several containers, their items."""
        return self.sample.call(OPERATIONS[self.title], tensors)

    def __repr__(self):
        tensors = zip(self.sample.tensors, self.placements, strict=True)
        shown = [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)} as {chosen}" for one, chosen in tensors]
        shown += [repr(other) for other in self.sample.others if other is not TENSOR]
        return f"{self.title} of sample {self.number} ({', '.join(shown)})"


def calls(titles):
    """Strategy: a mesh, and a call of one of the operations on it."""
    return st.tuples(st.sampled_from(titles), st.integers(0, SAMPLES - 1), device_meshes(max_dims=2)).flatmap(placed)


def placed(parts):
    title, number, mesh = parts
    samples = samples_of(title)
    assume(samples)
    number %= len(samples)
    each = st.tuples(*[placements(mesh, one, partial=partial_of(one)) for one in samples[number].tensors])
    return st.tuples(st.just(mesh), st.builds(Call, st.just(title), st.just(number), each))


def partial_of(tensor):
    return ("sum",) if tensor.dtype.is_floating_point else ()


# -- the cases of every run

MESHES = ((4,), (2, 2), (4,), (1, 4), (2, 2), (4, 1))  # those with ranks in one dim, or in two, more often
SHARE = 4  # one title in so many


def fixed_cases():
    """Return a case for some titles, which the title alone decides: no version of Hypothesis draws other ones."""
    found = [fixed_case(title) for title in sorted(OPERATIONS) if random.Random(title).random() < 1 / SHARE]
    return [case for case in found if case is not None and not is_known_to_fail(*case)]


def fixed_case(title):
    """Return a mesh and a call on it; None if the operation has no sample."""
    samples = samples_of(title)
    if not samples:
        return None
    chosen = random.Random(f"{title} on ranks")
    mesh = MeshPlan(one_of(chosen, MESHES))
    number = one_of(chosen, range(len(samples)))
    return mesh, Call(title, number, tuple(fixed_placements(chosen, mesh, each) for each in samples[number].tensors))


def fixed_placements(chosen, mesh, tensor):
    """Return a placement for each dim of the mesh."""
    kinds = [Replicate(), *map(Shard, range(tensor.dim())), *map(Partial, partial_of(tensor))]
    return tuple(one_of(chosen, kinds) for _ in mesh.shape)


def one_of(chosen, values):
    """Choose one of some values by the only method of `Random` whose results Python promises to keep."""
    return values[int(chosen.random() * len(values))]


# -- what is known to be wrong


def is_distributed(layout):
    return any(not placement.is_replicate() for placement in layout.placements)


@dataclass(frozen=True)
class KnownFault:
    """Operations that are wrong if a tensor has such a layout. `page`: the file in docs/found."""

    page: str
    when: object
    titles: tuple

    def concerns(self, mesh, call):
        return call.title in self.titles and any(map(self.when, call.layouts(mesh)))


FLATTENING = ("flatten", "nn.functional.linear", "ravel", "reshape", "unfold", "view")

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
    KnownFault(
        "convolution_of_sharded_weights",
        is_distributed,
        tuple(f"nn.functional.conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)),
    ),
    KnownFault(
        "fft_of_a_rank_without_rows",
        ArgumentLayout.may_leave_a_rank_empty,
        tuple(title for title in OPERATIONS if title.startswith("fft.")),
    ),
    KnownFault(
        "flatten_of_a_dim_sharded_twice",
        ArgumentLayout.is_unevenly_sharded_twice,
        tuple(title for title in OPERATIONS if title.startswith(FLATTENING)),
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
    KnownFault("cross_product_of_broadcast_rows", is_distributed, ("cross", "linalg.cross")),
    KnownFault("embedding_rank_without_rows", is_distributed, ("nn.functional.embedding",)),
    KnownFault("cumsum_of_a_sharded_dim", is_distributed, ("cumprod", "cumsum", "logcumsumexp")),
)


def is_known_to_fail(mesh, call):
    return any(fault.concerns(mesh, call) for fault in KNOWN_FAULTS)
