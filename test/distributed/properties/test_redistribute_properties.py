"""Redistribute any placements to any others and back: the full tensor stays the same, and each rank has its shard."""

import re

import redistribute_examples as examples
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from known_versions import repaired
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import (
    device_meshes,
    distribute,
    dtensors,
    given,
    in_order,
    note,
    placements,
    replay,
    settings,
    shapes,
    tensors,
)

# Torch refuses to turn replicated tensors into partial sums; on 2.13 also shards, but not on 2.14.1 and 2.15.0.
REFUSAL = "Can not redistribute from .* to P"
CAN_TURN_SHARDS_INTO_PARTIALS = torch.__version__ >= (2, 14)


def is_refused(source, target):
    return target.is_partial() and not (source.is_shard() and CAN_TURN_SHARDS_INTO_PARTIALS)


FULL = tensors(shapes(1), torch.float32, contiguous=True)
PROFILE = settings(max_examples=40, database=None, derandomize=True)


def with_other_placements(plan):
    others = placements(plan.mesh, plan.full, partial=())
    return st.tuples(st.just(plan), st.just(plan.full), others)


def local_part(full, dim, mesh, order):
    """Return this rank's part after these mesh dims split a dim, one after the other.

    The parts are those of torch.chunk: ceil(size / parts) elements each, and fewer in the last ones.
    """
    for mesh_dim in order:
        size, parts = full.shape[dim], mesh.size(mesh_dim)
        each = -(-size // parts)
        start = min(size, each * mesh.get_local_rank(mesh_dim))
        full = full.narrow(dim, start, min(each, size - start))
    return full


def sharded_in_any_order(parts):
    """A tensor, and a dim of it that all dims of the mesh shard in an order other than left to right."""
    mesh, full = parts
    orders = st.permutations(range(mesh.ndim)).filter(lambda order: list(order) != sorted(order))
    return st.tuples(st.just(mesh), st.just(full), st.integers(0, full.dim() - 1), orders, placements(mesh, full))


@requires_gloo()
class TestRedistribute(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def check_there_and_back(self, case):
        tensor, full, others = case
        there = tensor.redistribute(placements=others)
        self.assertEqual(there.placements, others)
        self.assertEqual(there.full_tensor(), full)
        self.check_back(there, tensor.placements, full)
        self.check_shard(there, full)

    def check_back(self, there, placements, full):
        pairs = zip(there.placements, placements, strict=True)
        refused = any(is_refused(source, target) for source, target in pairs)
        try:
            back = there.redistribute(placements=placements)
        except RuntimeError as error:
            if not (refused and re.search(REFUSAL, str(error))):
                raise
            return
        if refused:
            repaired(f"no longer refuses to turn {there.placements} into {placements}: correct is_refused")
        self.assertEqual(back.full_tensor(), full)

    def check_shard(self, tensor, full):
        """Check this rank's shard if exactly one dim of the mesh shards the tensor."""
        sharding = [mesh_dim for mesh_dim, placement in enumerate(tensor.placements) if placement.is_shard()]
        if len(sharding) == 1:
            dim = tensor.placements[sharding[0]].dim
            self.assertEqual(tensor.to_local(), local_part(full, dim, tensor.device_mesh, sharding))

    @PROFILE
    @replay(examples.ON_1D_MESHES)
    @given(case=dtensors(device_meshes(max_dims=1)).flatmap(with_other_placements))
    def test_on_1d_meshes(self, case):
        self.check_there_and_back(case)

    @PROFILE
    @replay(examples.ON_2D_MESHES)
    @given(case=dtensors(device_meshes(2, 2)).flatmap(with_other_placements))
    def test_on_2d_meshes(self, case):
        self.check_there_and_back(case)

    @PROFILE
    @replay(examples.IN_ANOTHER_ORDER)
    @given(case=st.tuples(device_meshes(2, 3), FULL).flatmap(sharded_in_any_order))
    def test_strided_shards(self, case):
        """Strided shards express another order of mesh dims: the second one first, say, as in FSDP after TP."""
        mesh, full, dim, order, others = case
        strided = in_order([Shard(dim)] * mesh.ndim, order, mesh.shape)
        tensor = distribute(full, mesh, strided)
        note(f"{strided}")
        self.assertEqual(tensor.to_local(), local_part(full, dim, mesh, order))
        self.assertEqual(tensor.full_tensor(), full)
        self.assertEqual(distribute(full, mesh, others).redistribute(placements=strided).to_local(), tensor.to_local())
        if not any(map(is_refused, strided, others)):
            self.assertEqual(tensor.redistribute(placements=others).full_tensor(), full)


class TestRedistributeOnThreeRanks(TestRedistribute):
    world_size = 3


@requires_gloo()
class TestCollectivesOfRedistribute(MultiProcessTestCase):
    """Not a property: which collectives each redistribution runs."""

    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_on_one_mesh_dim(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        mesh = init_device_mesh("cpu", (self.world_size,))
        targets = [Replicate(), Shard(0), Shard(1)]
        lines = [f"{source} -> {target}: {collectives(mesh, source, target)}" for source, target in pairs(targets)]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
R -> S(0): nothing
R -> S(1): nothing
S(0) -> R: all_gather_into_tensor
S(0) -> S(1): all_gather_into_tensor
S(1) -> R: all_gather_into_tensor
S(1) -> S(0): all_gather_into_tensor
P(sum) -> R: all_reduce
P(sum) -> S(0): reduce_scatter_tensor
P(sum) -> S(1): reduce_scatter_tensor""",
        )


def pairs(targets):
    return [(source, target) for source in (*targets, Partial()) for target in targets if source != target]


def collectives(mesh, source, target):
    tensor = distribute(torch.ones(8, 8), mesh, [source])
    with CommDebugMode() as seen:
        tensor.redistribute(placements=[target]).to_local()
    return ", ".join(str(op).partition(".")[2] for op in seen.get_comm_counts()) or "nothing"


if __name__ == "__main__":
    run_tests()
