"""Save DTensors on one mesh and load them on another: every element comes back, whatever the placements."""

import os
import shutil

import checkpoint_examples as examples
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import (
    DTensorPlan,
    device_meshes,
    distribute,
    given,
    placements,
    replay,
    settings,
    shapes,
    tensors,
)

PROFILE = settings(max_examples=25, database=None, derandomize=True)
MESHES = device_meshes(max_dims=2)
FULL = shapes(0, 3).flatmap(
    lambda shape: st.sampled_from([torch.float32, torch.int64, torch.bfloat16]).flatmap(
        lambda dtype: tensors(shape, dtype, contiguous=True)
    )
)


def whole(mesh, full):
    """Placements of which each rank's part has values of the full tensor: no partial sums."""
    return placements(mesh, full, partial=(), strided=True)


def saved_and_loaded(full):
    """A DTensor, and the mesh and placements of the one into which it is loaded."""

    def place(meshes):
        source, target = meshes
        saved = whole(source, full).map(lambda chosen: DTensorPlan(full, source, chosen))
        return st.tuples(st.just(full), saved, st.just(target), whole(target, full))

    return st.tuples(MESHES, MESHES).flatmap(place)


CASE = FULL.flatmap(saved_and_loaded)


@requires_gloo()
class TestCheckpoints(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def saved(self, state):
        """Save a state dict; return its directory, which all ranks see."""
        self.count = getattr(self, "count", 0) + 1
        directory = os.path.join(os.path.dirname(self.file_name), f"checkpoint{self.count}")
        dcp.save(state, checkpoint_id=directory)
        return directory

    def removed(self, directory):
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(directory)

    @PROFILE
    @replay(examples.ON_ANOTHER_MESH)
    @given(case=CASE)
    def test_load_on_another_mesh(self, case):
        full, saved, mesh, chosen = case
        directory = self.saved({"tensor": saved})
        loaded = {"tensor": distribute(torch.zeros_like(full), mesh, chosen)}
        dcp.load(loaded, checkpoint_id=directory)
        self.assertEqual(loaded["tensor"].to_local(), distribute(full, mesh, chosen).to_local())
        self.assertEqual(loaded["tensor"].placements, chosen)
        self.removed(directory)

    @PROFILE
    @replay(examples.AS_A_PLAIN_TENSOR)
    @given(case=CASE)
    def test_load_as_a_plain_tensor_and_back(self, case):
        full, saved, mesh, chosen = case
        directory = self.saved({"tensor": saved})
        plain = {"tensor": torch.zeros_like(full)}
        dcp.load(plain, checkpoint_id=directory)
        self.assertEqual(plain["tensor"], full)
        directory_of_plain = self.saved(plain)
        loaded = {"tensor": distribute(torch.zeros_like(full), mesh, chosen)}
        dcp.load(loaded, checkpoint_id=directory_of_plain)
        self.assertEqual(loaded["tensor"].full_tensor(), full)
        self.removed(directory)
        self.removed(directory_of_plain)

    @PROFILE
    @replay(examples.NESTED_STATES)
    @given(cases=st.lists(CASE, min_size=1, max_size=3), number=st.integers(), text=st.text(max_size=3))
    def test_nested_states(self, cases, number, text):
        def state(tensors, number, text):
            return {
                "model": {f"layer.{i}": {"weight": tensor} for i, tensor in enumerate(tensors)},
                "list": [*tensors, number],
                "step": number,
                text: {"text": text},
            }

        directory = self.saved(state([saved for _, saved, _, _ in cases], number, text))
        loaded = state([distribute(torch.zeros_like(full), mesh, chosen) for full, _, mesh, chosen in cases], 0, text)
        dcp.load(loaded, checkpoint_id=directory)
        for i, (full, _, _, _) in enumerate(cases):
            self.assertEqual(loaded["model"][f"layer.{i}"]["weight"].full_tensor(), full)
            self.assertEqual(loaded["list"][i].full_tensor(), full)
        self.assertEqual([loaded["step"], loaded["list"][-1], loaded[text]], [number, number, {"text": text}])
        self.removed(directory)


class TestCheckpointsOnThreeRanks(TestCheckpoints):
    world_size = 3


if __name__ == "__main__":
    run_tests()
