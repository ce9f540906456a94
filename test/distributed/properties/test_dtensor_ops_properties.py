"""op(dtensor).full_tensor() == op(full), for any layout of the arguments.

dtensor_ops_support.py lists what torch refuses, by operation, layout and version. Where an example meets an entry
for its layout, torch must refuse it, with the listed message.
"""

import re

import dtensor_ops_examples as examples
import torch
from dtensor_ops_support import (
    OF_TWO,
    POINTWISE,
    REDUCTIONS,
    VIEWS,
    ArgumentLayout,
    ExpectedResult,
    expected_result,
    is_known_to_be_wrong,
)
from hypothesis import strategies as st
from known_versions import repaired

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import (
    DTensorPlan,
    HealthCheck,
    assume,
    device_meshes,
    dtensors,
    given,
    placements,
    reject,
    replay,
    settings,
    shapes,
    tensors,
)

LOST_PEER = "losed by peer|Socket closed"  # the error of a rank whose wait for another rank was interrupted
PROFILE = settings(max_examples=60, database=None, derandomize=True)

SIZES = (1, 2, 3, 4, 5, 7, 8)  # reductions of empty tensors follow special rules, in plain torch too
FULL = tensors(shapes(1, 3, SIZES), torch.float32, contiguous=True)
ARGUMENTS = dtensors(device_meshes(max_dims=2), FULL)


def with_full(plan):
    return st.tuples(st.tuples(st.just(plan)), st.tuples(st.just(plan.full)))


def placed(mesh, full):
    return placements(mesh, full).map(lambda chosen: DTensorPlan(full, mesh, chosen))


def two_placed(parts):
    mesh, left, right = parts
    return st.tuples(st.tuples(placed(mesh, left), placed(mesh, right)), st.tuples(st.just(left), st.just(right)))


def two_arguments(shapes_of_two):
    """Two DTensors on one mesh, each with its own placements."""
    whole = [tensors(shape, torch.float32, contiguous=True) for shape in shapes_of_two]
    return st.tuples(device_meshes(max_dims=2), *whole).flatmap(two_placed)


def broadcastable(shape):
    """Two shapes: the second equals the first, or lacks dims of it, or has size 1 in them."""
    return st.sampled_from([(shape, shape), (shape, shape[-1:]), (shape, (*shape[:-1], 1)), ((1, *shape[1:]), shape)])


def factors(sizes):
    batch, rows, inner, columns = sizes
    left, right = (rows, inner), (inner, columns)
    return st.sampled_from(
        [(left, right), ((batch, *left), right), ((batch, *left), (batch, *right)), (left, (inner,))]
    )


@requires_gloo()
class TestOps(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def check(self, name, op, arguments, full_ones):
        first = arguments[0]
        layout = ArgumentLayout(tuple(first.shape), tuple(first.device_mesh.shape), first.placements)
        expected, message = expected_result(name, layout)
        assume(not is_known_to_be_wrong(name, layout))
        try:
            got = op(*arguments).full_tensor()
        except (RuntimeError, IndexError) as error:
            if expected is ExpectedResult.ANSWER or not re.search(f"{message}|{LOST_PEER}", str(error)):
                raise
            reject()  # possibly only in this rank: then the others are interrupted
        if expected is ExpectedResult.REFUSAL:
            repaired(f"no longer refuses {name} of {layout}: give its entry in the table an end")
        self.assertEqual(got, op(*full_ones))

    @settings(PROFILE, suppress_health_check=[HealthCheck.filter_too_much])
    @replay(examples.POINTWISE)
    @given(name=st.sampled_from(sorted(POINTWISE)), case=ARGUMENTS.flatmap(with_full))
    def test_pointwise(self, name, case):
        self.check(name, POINTWISE[name], *case)

    @settings(PROFILE, suppress_health_check=[HealthCheck.filter_too_much])
    @replay(examples.REDUCTIONS)
    @given(name=st.sampled_from(sorted(REDUCTIONS)), case=ARGUMENTS.flatmap(with_full))
    def test_reductions(self, name, case):
        self.check(name, REDUCTIONS[name], *case)

    @settings(PROFILE, suppress_health_check=[HealthCheck.filter_too_much])
    @replay(examples.VIEWS)
    @given(name=st.sampled_from(sorted(VIEWS)), case=ARGUMENTS.flatmap(with_full))
    def test_views(self, name, case):
        self.check(name, VIEWS[name], *case)

    @PROFILE
    @replay(examples.OF_TWO)
    @given(
        name=st.sampled_from(sorted(OF_TWO)),
        case=shapes(1, 3, SIZES).flatmap(broadcastable).flatmap(two_arguments),
    )
    def test_pointwise_of_two(self, name, case):
        self.check(name, OF_TWO[name], *case)

    @settings(PROFILE, suppress_health_check=[HealthCheck.filter_too_much])
    @replay(examples.MATMUL)
    @given(case=st.tuples(*[st.sampled_from(SIZES)] * 4).flatmap(factors).flatmap(two_arguments))
    def test_matmul(self, case):
        arguments, full_ones = case
        is_mixed = [argument.dim() for argument in arguments] == [3, 2]
        self.check("matmul of a batch and a matrix" if is_mixed else "matmul", torch.matmul, arguments, full_ones)


if __name__ == "__main__":
    run_tests()
