"""Operations and sample inputs of torch's own OpInfo database, for a search and for choosing examples."""

import functools
import itertools
from dataclasses import dataclass

import torch
from dtensor_opinfo_support import Call, partial_of
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from torch_testing_ext._machine.cuda import answering_for_torch
from torch_testing_ext.hypothesis_utils import assume, device_meshes, placements

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
# From torch 2.12 on, one call takes ten seconds and more (docs/found/endless_search_for_attention.py).
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


@functools.cache
def samples_of(title):
    """Return samples of an operation, each as its arguments, the same ones in every rank."""
    info = OPERATIONS[title]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = itertools.islice(info.sample_inputs("cpu", dtype_of(info), requires_grad=False), SAMPLES)
        found = [((each.input, *each.args), each.kwargs) for each in drawn]
    return [each for each in found if can_be_placed(each)]


def tensors_in(sample):
    return [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)]


def can_be_placed(sample):
    tensors = tensors_in(sample)
    return bool(tensors) and all(
        one.layout is torch.strided and not one.is_quantized and one.numel() <= LARGEST for one in tensors
    )


@dataclass(frozen=True)
class SampleCall(Call):
    """A call of an operation with the sample of this number. Each rank looks it up, for it may not be picklable."""

    number: int = 0
    must_answer = False

    @property
    def function(self):
        return OPERATIONS[self.title]

    @property
    def arguments(self):
        return samples_of(self.title)[self.number]

    def __repr__(self):
        return f"{super().__repr__()} of sample {self.number}"


def calls():
    """Strategy: a mesh, and a call of one of the operations on it."""
    titles = st.sampled_from(sorted(OPERATIONS))
    return st.tuples(titles, st.integers(0, SAMPLES - 1), device_meshes(max_dims=2)).flatmap(placed)


def placed(parts):
    title, number, mesh = parts
    samples = samples_of(title)
    assume(samples)
    number %= len(samples)
    each = st.tuples(*[placements(mesh, one, partial=partial_of(one)) for one in tensors_in(samples[number])])
    return st.tuples(st.just(mesh), each.map(lambda chosen: SampleCall(title, chosen, number=number)))
