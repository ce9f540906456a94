"""op(dtensor).full_tensor() == op(full), for any layout of the arguments.

Which ops torch refuses in some layout is data: REFUSED names them with the words of the refusal, and a refusal that is
not in the table fails. So far the table is empty: of these ops none was refused, on torch 2.13 and 2.15.
"""

import torch
from hypothesis import strategies as st

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import (
    device_meshes,
    dtensors,
    given,
    note,
    placements,
    settings,
    shapes,
    tensors,
)

PROFILE = settings(max_examples=60, database=None, derandomize=True)

POINTWISE = {
    "neg": torch.neg,
    "relu": torch.relu,
    "mul 2": lambda x: x * 2,
    "add 1": lambda x: x + 1,
    "square": torch.square,
    "exp": lambda x: torch.exp(-x),
    "where": lambda x: torch.where(x > 3, x, -x),
    "clamp": lambda x: x.clamp(2, 9),
}
REDUCTIONS = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "sum of a dim": lambda x: x.sum(0),
    "mean kept": lambda x: x.mean(-1, keepdim=True),
    "argmax": lambda x: x.argmax(-1),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(-1),
}
VIEWS = {
    "flatten": torch.flatten,
    "unsqueeze": lambda x: x.unsqueeze(0),
    "transpose": lambda x: x.transpose(0, -1),
    "reshape": lambda x: x.reshape(-1, x.shape[-1]),
    "movedim": lambda x: x.movedim(0, -1),
}
REFUSED: dict[str, str] = {}  # op: words of the refusal
ERRORS_OF_REFUSAL = (RuntimeError, NotImplementedError, ValueError)

SIZES = (1, 2, 3, 4, 5, 7, 8)  # reductions of nothing have rules of their own, in plain torch too
ARGUMENTS = dtensors(device_meshes(max_dims=2), tensors(shapes(1, 3, SIZES), torch.float32, contiguous=True))


def with_full(plan):
    return st.tuples(st.just(plan), st.just(plan.full))


def matmul_arguments(sizes):
    rows, inner, columns = sizes

    def place(parts):
        mesh, left, right = parts
        return st.tuples(placed(left, mesh), placed(right, mesh), st.just(left), st.just(right))

    return st.tuples(device_meshes(max_dims=2), whole(rows, inner), whole(inner, columns)).flatmap(place)


def whole(*shape):
    return tensors(shape, torch.float32, contiguous=True)


def placed(full, mesh):
    from torch_testing_ext.hypothesis_utils import DTensorPlan

    return placements(mesh, full).map(lambda chosen: DTensorPlan(full, mesh, chosen))


class TestOps(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def check(self, name, op, argument, full):
        expected = op(full)
        note(f"{name} of {tuple(full.shape)} as {argument.placements} on a mesh of {tuple(argument.device_mesh.shape)}")
        try:
            got = op(argument)
        except ERRORS_OF_REFUSAL as refusal:
            words = REFUSED.get(name)
            if words is None or words not in str(refusal):
                raise
            return
        self.assertEqual(got.full_tensor(), expected)

    @PROFILE
    @given(name=st.sampled_from(sorted(POINTWISE)), case=ARGUMENTS.flatmap(with_full))
    def test_pointwise(self, name, case):
        self.check(name, POINTWISE[name], *case)

    @PROFILE
    @given(name=st.sampled_from(sorted(REDUCTIONS)), case=ARGUMENTS.flatmap(with_full))
    def test_reductions(self, name, case):
        self.check(name, REDUCTIONS[name], *case)

    @PROFILE
    @given(name=st.sampled_from(sorted(VIEWS)), case=ARGUMENTS.flatmap(with_full))
    def test_views(self, name, case):
        self.check(name, VIEWS[name], *case)

    @PROFILE
    @given(case=st.tuples(*[st.sampled_from(SIZES)] * 3).flatmap(matmul_arguments))
    def test_matmul(self, case):
        left, right, full_left, full_right = case
        self.assertEqual((left @ right).full_tensor(), full_left @ full_right)


if __name__ == "__main__":
    run_tests()
