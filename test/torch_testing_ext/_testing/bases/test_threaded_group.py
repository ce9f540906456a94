"""Process groups of threads: each collective has the same result as with gloo in processes."""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

from torch_testing_ext.common_distributed import MultiProcessTestCase, spawn_threads_and_init_comms
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.distributed.multi_threaded_pg import (
    LeftAlone,
    ProcessLocalGroup,
    ThreadLocalWorld,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

SIZE = 3
Result = list[torch.Tensor]
CASES: dict[str, Callable[[int], Result]] = {}


def case(function: Callable[[int], Result]) -> None:
    CASES[function.__name__] = function


def own(rank: int, *shape: int) -> torch.Tensor:
    """A tensor whose values show its rank and the index of each number."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * (rank + 1)


def empties(count: int, *shape: int) -> Result:
    return [torch.zeros(shape) for _ in range(count)]


for name in ("SUM", "PRODUCT", "MIN", "MAX"):

    def reduce_by(rank: int, op: str = name) -> Result:
        tensor = own(rank, 2, 2)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        return [tensor]

    CASES[f"all_reduce_{name}"] = reduce_by

for name in ("BAND", "BOR", "BXOR"):

    def combine_by(rank: int, op: str = name) -> Result:
        tensor = torch.tensor([5, 9]) + rank
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        return [tensor]

    CASES[f"all_reduce_{name}"] = combine_by


@case
def all_reduce_coalesced(rank: int) -> Result:
    tensors = [own(rank, 2), own(rank, 3)]
    dist.all_reduce_coalesced(tensors)
    return tensors


@case
def reduce(rank: int) -> Result:
    tensor = own(rank, 2)
    dist.reduce(tensor, dst=1)
    return [tensor] if rank == 1 else []


@case
def broadcast(rank: int) -> Result:
    tensor = own(rank, 2)
    dist.broadcast(tensor, src=2)
    return [tensor]


@case
def broadcast_without_waiting(rank: int) -> Result:
    tensor = own(rank, 2)
    work = dist.broadcast(tensor, src=0, async_op=True)
    work.wait()
    return [tensor, torch.tensor(work.is_completed())]


@case
def all_gather(rank: int) -> Result:
    tensors = empties(SIZE, 2, 2)
    dist.all_gather(tensors, own(rank, 2, 2))
    return tensors


@case
def all_gather_into_tensor(rank: int) -> Result:
    joined = torch.zeros(SIZE * 2, 2)
    dist.all_gather_into_tensor(joined, own(rank, 2, 2))
    return [joined]


@case
def gather(rank: int) -> Result:
    places = empties(SIZE, 2) if rank == 1 else None
    dist.gather(own(rank, 2), places, dst=1)
    return places or []


@case
def scatter(rank: int) -> Result:
    tensor = torch.zeros(2)
    dist.scatter(tensor, [own(other, 2) for other in range(SIZE)] if rank == 1 else None, src=1)
    return [tensor]


@case
def reduce_scatter(rank: int) -> Result:
    tensor = torch.zeros(2)
    dist.reduce_scatter(tensor, [own(rank + other, 2) for other in range(SIZE)])
    return [tensor]


@case
def reduce_scatter_tensor(rank: int) -> Result:
    tensor = torch.zeros(2, 2)
    dist.reduce_scatter_tensor(tensor, own(rank, SIZE * 2, 2))
    return [tensor]


@case
def all_to_all_single(rank: int) -> Result:
    even, uneven = torch.zeros(SIZE, 2), torch.zeros(sum(range(1, SIZE + 1)))
    dist.all_to_all_single(even, own(rank, SIZE, 2))
    sizes = [rank + 1] * SIZE
    dist.all_to_all_single(uneven, own(rank, sum(sizes)), list(range(1, SIZE + 1)), sizes)
    return [even, uneven]


@case
def barrier_and_objects(rank: int) -> Result:
    dist.barrier()
    seen: list[object] = [None] * SIZE
    dist.all_gather_object(seen, {"rank": rank})
    told = ["from 2"] if rank == 2 else [None]
    dist.broadcast_object_list(told, src=2)
    return [torch.tensor([entry["rank"] for entry in seen]), torch.tensor(told == ["from 2"])]  # type: ignore[index]


@case
def subgroups(rank: int) -> Result:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
    tensors = []
    for group, members in zip(groups, ([0, 2], [1, 2]), strict=True):
        if rank in members:
            tensors.append(own(rank, 2))
            dist.all_reduce(tensors[-1], group=group)
    return tensors


@case
def functional(rank: int) -> Result:
    mesh = init_device_mesh("cpu", (SIZE,))
    gathered = funcol.all_gather_tensor(own(rank, 2), 0, (mesh, 0))
    return [funcol.all_reduce(own(rank, 2), "sum", (mesh, 0)) + 0, gathered + 0]


@case
def backward(rank: int) -> Result:
    mesh = init_device_mesh("cpu", (SIZE,))
    tensor = own(rank, 2).requires_grad_()
    (funcol.all_gather_tensor_autograd(tensor, 0, (mesh, 0)) * (rank + 1)).sum().backward()
    assert tensor.grad is not None
    return [tensor.grad]


def run_all(rank: int) -> dict[str, Result]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # for names that newer versions of torch deprecate
        return {name: function(rank) for name, function in CASES.items()}


class OnGloo(MultiProcessTestCase):
    """Its method has a name without `test`, so that no loader collects it."""

    world_size = SIZE

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def computes(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        torch.save(run_all(self.rank), os.path.join(os.environ["RESULTS"], str(self.rank)))


class TestCollectives(TestCase):
    def test_same_results_as_gloo(self) -> None:
        threads: dict[int, dict[str, Result]] = {}

        @spawn_threads_and_init_comms(world_size=SIZE)
        def compute(self: TestCase) -> None:
            threads[dist.get_rank()] = run_all(dist.get_rank())

        with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, RESULTS=directory):
            OnGloo("computes").debug()
            gloo = {rank: torch.load(os.path.join(directory, str(rank))) for rank in range(SIZE)}
        compute(self)
        self.assertEqual(len(CASES), 22)
        for name in CASES:
            for rank in range(SIZE):
                with self.subTest(collective=name, rank=rank):
                    self.assertEqual(threads[rank][name], gloo[rank][name])

    @spawn_threads_and_init_comms(world_size=2)
    def test_average_and_scaled_sum(self) -> None:
        """gloo has neither."""
        rank = dist.get_rank()
        tensor = torch.tensor([2.0 * rank])
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        self.assertEqual(tensor.item(), 1.0)

    @spawn_threads_and_init_comms(world_size=2)
    def test_gathering_uneven_sizes(self) -> None:
        places = [torch.zeros(1), torch.zeros(2)]
        dist.all_gather(places, own(dist.get_rank(), dist.get_rank() + 1))
        self.assertEqual(places, [own(0, 1), own(1, 2)])

    @spawn_threads_and_init_comms(world_size=2)
    def test_gathering_into_a_stack(self) -> None:
        stacked = torch.zeros(2, 3)
        dist.all_gather_into_tensor(stacked, own(dist.get_rank(), 3))
        self.assertEqual(stacked, torch.stack([own(0, 3), own(1, 3)]))

    @spawn_threads_and_init_comms(world_size=2)
    def test_list_of_tensors_to_all(self) -> None:
        rank = dist.get_rank()
        places = empties(2, 1)
        dist.all_to_all(places, [torch.tensor([10.0 * rank + other]) for other in range(2)])
        self.assertEqual(torch.cat(places), torch.tensor([0.0 + rank, 10.0 + rank]))

    @spawn_threads_and_init_comms(world_size=2)
    def test_sizes_in_a_tensor(self) -> None:
        """gloo accepts only lists, PyTorch's threads both."""
        rank = dist.get_rank()
        sizes = torch.tensor([2, 1])
        received = torch.zeros(2 * int(sizes[rank]))
        dist.all_to_all_single(received, own(rank, 3), sizes[rank].repeat(2), sizes)  # type: ignore[arg-type]
        part = slice(0, 2) if rank == 0 else slice(2, 3)
        self.assertEqual(received, torch.cat([own(0, 3)[part], own(1, 3)[part]]))

    @spawn_threads_and_init_comms(world_size=2)
    def test_attributes_of_a_group(self) -> None:
        group = dist.group.WORLD
        self.assertIsInstance(group, ProcessLocalGroup)
        self.assertEqual((group.size(), group.rank()), (2, dist.get_rank()))
        self.assertEqual((group.getBackendName(), dist.get_backend()), ("threaded", "threaded"))
        self.assertEqual(group.group_name, group.pg_name)

    @spawn_threads_and_init_comms(world_size=2)
    def test_the_group_can_be_created_again(self) -> None:
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("threaded", rank=rank, world_size=2, store=dist.HashStore())
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)


class TestWorlds(TestCase):
    def test_another_backend_has_the_name(self) -> None:
        """PyTorch's own kit registers the same name, and a process may import both."""
        plugins = dist.Backend._plugins
        self.addCleanup(plugins.update, THREADED=plugins["THREADED"])
        devices = dist.Backend.backend_capability["threaded"]
        dist.Backend.register_backend("threaded", lambda *_: self.fail("theirs"), extended_api=True, devices=devices)
        theirs = plugins["THREADED"]
        sums = []

        @spawn_threads_and_init_comms(world_size=2)
        def reduce(_):
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            sums.append(tensor.item())

        reduce(self)
        self.assertEqual(sums, [2.0, 2.0])
        self.assertIs(plugins["THREADED"], theirs)

    def test_each_thread_has_its_own_world_and_the_original_is_restored(self) -> None:
        before = dist.distributed_c10d._world
        world = _install_threaded_pg()
        try:
            self.assertIs(dist.distributed_c10d._world, world)
            self.assertIsInstance(world, ThreadLocalWorld)
            self.assertFalse(dist.is_initialized())
        finally:
            _uninstall_threaded_pg()
        self.assertIs(dist.distributed_c10d._world, before)

    def test_no_thread_waits_after_the_end_of_the_test(self) -> None:
        """Not even for a rank that arrived, and ended before it could execute the collective."""
        world = ThreadLocalWorld()
        rendezvous = world.rendezvous("group", (0, 1))
        rendezvous._current.arguments[0] = ("barrier", ())
        messages: list[str] = []

        def wait() -> None:
            try:
                rendezvous.take_part(1, "barrier", (), lambda arguments: None, {})
            except LeftAlone as error:
                messages.append(str(error))

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        with world.changed:
            self.assertTrue(world.changed.wait_for(lambda: 1 in rendezvous._current.arguments, 60))
        world.close()
        waiting.join(10)
        self.assertEqual(messages, ["left alone in barrier: the test is over"])

    def test_all_state_of_c10d_is_kept_per_thread(self) -> None:
        """A version of torch that keeps more state must fail here, and not make other tests flaky."""
        kept = type(dist.distributed_c10d._world)
        derived = {"pg_config_info"}  # from the others
        names = {name for name, value in vars(kept).items() if isinstance(value, property)} - derived
        shared = {name for name in names if getattr(ThreadLocalWorld, name) is getattr(kept, name)}
        self.assertEqual(shared, set())


if __name__ == "__main__":
    run_tests()
