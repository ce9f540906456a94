"""Sound programs under all checks of the sanitizer: nothing is found, and the tests pass."""

import _thread
import contextlib
import io
import os
import queue
import threading
import unittest
from collections import deque
from datetime import timedelta
from functools import partial
from operator import methodcaller
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.planted_ranks import Fresh, in_fresh_ranks, outcome_with_tear_down
from planted_sanitized import FAULTS
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    collectives_may_differ,
    sanitize,
)
from torch_testing_ext.common_utils import run_tests

WORLD_SIZE = 3


def ones(count=4):
    return torch.ones(count)


@sanitize("all", "races")
class Sound(MultiProcessTestCase):
    """Subclasses of no loader: the methods have no `test` in their names."""

    world_size = WORLD_SIZE

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join(self, **options):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, **options)

    def every_collective(self):
        self.join()
        size, mine = self.world_size, ones()
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        for op, nothing in ((dist.ReduceOp.MAX, -torch.inf), (dist.ReduceOp.MIN, torch.inf)):
            dist.all_reduce(torch.tensor([1.0 if self.rank else nothing]), op)
        dist.broadcast(mine, 1)
        dist.reduce(mine, 2)
        parts = [torch.empty(4) for _ in range(size)]
        dist.all_gather(parts, ones())
        self.assertEqual(parts, [ones()] * size)
        whole = torch.empty(4 * size)
        dist.all_gather_into_tensor(whole, ones())
        self.assertEqual(whole, ones(4 * size))
        dist.gather(ones(), parts if self.rank == 1 else None, dst=1)
        dist.scatter(mine, parts if self.rank == 1 else None, src=1)
        self.assertEqual(mine, ones())
        one = torch.empty(1)
        dist.reduce_scatter_tensor(one, ones(size))
        self.assertEqual(one.item(), size)
        dist.reduce_scatter(one, [ones(1) for _ in range(size)])
        dist.all_to_all_single(torch.empty(size), ones(size))
        dist.barrier()
        dist.monitored_barrier()

    def uneven_splits(self):
        self.join()
        # Rank r sends r + 1 elements to each.
        incoming = list(range(1, self.world_size + 1))
        got = torch.empty(sum(incoming))
        outgoing = [self.rank + 1] * self.world_size
        dist.all_to_all_single(got, torch.full((sum(outgoing),), float(self.rank)), incoming, outgoing)
        self.assertEqual(got, torch.repeat_interleave(torch.arange(3.0), torch.tensor(incoming)))

    def buffers_that_nobody_uses_before_the_wait(self):
        """Others' parts of a storage, the input of a gather, and the root of a broadcast may be read meanwhile."""
        self.join()
        mine, whole = ones(), torch.zeros(4 * self.world_size + 4)
        work = dist.all_gather_into_tensor(whole[:-4], mine, async_op=True)
        whole[-4:].add_(mine * 2)
        _ = whole[:4].shape, whole.view(-1, 4)
        work.wait()
        self.assertEqual(whole.sum().item(), 4 * self.world_size + 8)
        work = dist.broadcast(mine, 1, async_op=True)
        if self.rank == 1:
            self.assertEqual(mine.sum().item(), 4)
        work.wait()

    def output_that_contains_the_input(self):
        self.join()
        whole = torch.zeros(4 * self.world_size)
        mine = whole[4 * self.rank :][:4]
        mine.fill_(self.rank)
        dist.all_gather_into_tensor(whole, mine)
        self.assertEqual(whole, torch.arange(3.0).repeat_interleave(4))

    def issued_by_a_thread_without_python(self):
        """As by DDP's hooks in autograd's thread for a GPU: no frame of Python has called the kernel."""
        self.join()
        mine, done, group = torch.full((4,), float(self.rank)), queue.SimpleQueue(), dist.group.WORLD.boxed()
        for is_asynchronous in (True, False):
            kernel = torch.ops.c10d.broadcast_.default._op
            calls = [partial(kernel, [mine], group, 2, 0, is_asynchronous, -1), partial(done.put, "issued")]
            _thread.start_new_thread(deque, (map(methodcaller("__call__"), calls),))
            done.get()
        dist.barrier()
        self.assertEqual(mine, 2 * ones())

    def messages_in_a_ring(self):
        self.join()
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        for tag in (0, 7):
            got = torch.empty(4)
            works = [dist.isend(ones(), after, tag=tag), dist.irecv(got, before, tag=tag)]
            for work in works:
                work.wait()
            self.assertEqual(got, ones())
        got = torch.empty(4)
        operations = [dist.P2POp(dist.isend, ones(), after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self.assertEqual(got, ones())

    def messages_from_any_rank(self):
        self.join()
        if self.rank == 0:
            got = torch.empty(1)
            found = [(dist.recv(got), got.item()) for _ in range(2)]
            self.assertEqual(sorted(found), [(1, 1.0), (2, 2.0)])
            self.assertEqual([dist.recv(got, tag=tag) for tag in (2, 1)], [2, 1])
        else:
            dist.send(torch.tensor([float(self.rank)]), 0)
            dist.send(torch.tensor([float(self.rank)]), 0, tag=self.rank)

    def messages_between_collectives(self):
        """All ranks send first, and receive later, between the same collectives; and a thread sends by itself."""
        self.join()
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        for _ in range(2):
            works = [dist.isend(ones(), after), dist.irecv(torch.empty(4), before)]
            operations = [dist.P2POp(dist.irecv, torch.empty(4), after), dist.P2POp(dist.isend, ones(), before)]
            works += dist.batch_isend_irecv(operations if self.rank else operations[::-1])
            for work in works:
                work.wait()
            dist.all_reduce(ones())
        group = dist.new_group([0, 1])
        if self.rank == 2:
            return
        message = partial(dist.send, ones(), 1) if self.rank == 0 else partial(dist.recv, torch.empty(4), 0)
        thread = threading.Thread(target=message)
        if self.rank == 0:
            thread.start()
        dist.broadcast(ones(), 0, group=group)
        if self.rank == 1:
            thread.start()
        thread.join()

    def objects(self):
        self.join()
        found = [None] * self.world_size
        dist.all_gather_object(found, {"rank": "x" * (100 * self.rank)})
        listed = [self.rank]
        dist.broadcast_object_list(listed, src=2)
        self.assertEqual(listed, [2])
        gathered = found if self.rank == 0 else None
        dist.gather_object(self.rank, gathered)
        mine = [None]
        dist.scatter_object_list(mine, [1, 2, 3] if self.rank == 0 else None)
        self.assertEqual(mine, [self.rank + 1])

    def coalesced(self):
        self.join()
        tensors = [ones(), ones(3)]
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        self.assertEqual(tensors[0], 3 * ones())

    def overlapped(self):
        self.join()
        flat = torch.ones(8)
        work = dist.all_reduce(flat[:4], async_op=True)
        flat[4:].add_(1)  # the same storage, other memory
        work.wait()
        works = [dist.all_reduce(ones(), async_op=True) for _ in range(3)]
        for work in reversed(works):
            work.wait()
        future = dist.all_reduce(ones(), async_op=True).get_future()
        future.wait()
        dist.all_reduce(ones(), async_op=True).get_future().then(lambda future: future.value()[0].sum()).wait()
        dist.all_reduce_coalesced([ones()], async_op=True).wait()
        future = dist.all_reduce(ones(), async_op=True).get_future().then(lambda future: future.value()[0] / 3)
        future.then(lambda future: future.value().sum()).wait()
        has_run = threading.Event()
        dist.all_reduce(ones(), async_op=True).get_future().then(lambda _: has_run.set())
        has_run.wait()
        torch.futures.wait_all([dist.all_reduce(ones(), async_op=True).get_future() for _ in range(2)])
        columns = torch.zeros(3, 6)
        work = dist.all_reduce(columns[:, :3], async_op=True)
        columns[:, 3:].add_(1).tolist()
        self.assertEqual((columns.data.shape, columns.data_ptr() > 0), ((3, 6), True))
        work.wait()
        columns.data.add_(1)
        # A flat part has no shape of its own.
        mine, out = (torch.ones(2, 2), torch.empty(6, 2)) if self.rank else (ones(), torch.empty(12))
        dist.all_gather_into_tensor(out, mine)
        polled = dist.all_reduce(ones(), async_op=True)
        while not polled.is_completed():
            pass
        out, mine = torch.empty(12), ones()
        work = dist.all_gather_into_tensor(out, mine, async_op=True)
        mine.clone()
        work.wait()
        out.mul_(2)

    def buffers_used_again_after_the_wait(self):
        """By NumPy, in turns, by a second wait, by another thread that has waited, after a poll, and by a future."""
        self.join()
        buffers, works = [ones(), ones()], [None, None]
        for step in range(6):
            at = step % 2
            if works[at] is not None:
                works[at].wait()
            buffers[at].numpy()[:] = step
            works[at] = dist.all_reduce(buffers[at], async_op=True)
        for work, buffer in zip(works, buffers, strict=True):
            work.wait()
            buffer.numpy()[0] = 5
            work.wait()
        shared = ones(1000)
        work = dist.all_reduce(shared, async_op=True)

        def wait_and_write():
            work.wait()
            shared.numpy()[:] = 9

        thread = threading.Thread(target=wait_and_write)
        thread.start()
        work.wait()
        thread.join()
        work = dist.broadcast(shared, 1, async_op=True)
        while not work.is_completed():
            pass
        shared.numpy()[:] = 4
        dist.all_reduce(shared, async_op=True).get_future().wait()
        shared.numpy()[:] = 3
        flat = ones(8)
        other = torch.from_dlpack(flat)[4:]
        work = dist.all_reduce(flat[:4], async_op=True)
        other.add_(1)
        work.wait()
        torch.from_dlpack(flat).add_(1)

    def results_of_all_types(self):
        """Rounded and wrapped around as gloo does it, and with overflows on the way."""
        self.join()
        torch.manual_seed(self.rank)
        reductions = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        for dtype in (
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.int8,
            torch.uint8,
            torch.int64,
        ):
            for op in reductions:
                for size in (1, 100, 9000):
                    dist.all_reduce((50 * torch.randn(size)).to(dtype), op, async_op=True).wait()
        for numbers in ((1e-30, 1e-30, 1e30), (3e38, -3e38, 3e38)):
            for op in reductions:
                dist.all_reduce(torch.full((10,), numbers[self.rank]), op, async_op=True).wait()
        dist.all_reduce(torch.arange(4) + self.rank, dist.ReduceOp.BXOR, async_op=True).wait()
        dist.broadcast(torch.tensor([True, self.rank == 1]), 1, async_op=True).wait()
        dist.all_reduce(1j * torch.ones(3), async_op=True).wait()
        dist.reduce(ones() * self.rank, 1, async_op=True).wait()

    def results_of_all_kinds(self):
        self.join()
        size, mine, parts = self.world_size, ones(6) * self.rank, [torch.empty(6) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, async_op=True).wait()
        mine.numpy()[:] = 7 + self.rank
        dist.gather(mine, parts if self.rank == 2 else None, dst=2, async_op=True).wait()
        dist.scatter(mine, parts if self.rank == 2 else None, src=2, async_op=True).wait()
        self.assertEqual(mine, ones(6) * (7 + self.rank))
        whole = torch.zeros(6 * size)
        part = whole[6 * self.rank :][:6]
        part.fill_(self.rank)
        dist.all_gather_into_tensor(whole, part, async_op=True).wait()
        dist.reduce_scatter_tensor(mine, torch.arange(6.0 * size) + self.rank, async_op=True).wait()
        dist.reduce_scatter(mine, [ones(6) * rank for rank in range(size)], async_op=True).wait()
        dist.all_to_all_single(mine, torch.arange(6.0) + 10 * self.rank, async_op=True).wait()
        if torch.__version__ >= (2, 12):  # gloo had none before
            dist.all_to_all(parts, [ones(6) * rank + self.rank for rank in range(size)], async_op=True).wait()
        group = dist.new_group([0, 2])
        if self.rank != 1:
            dist.broadcast(mine, 2, group=group, async_op=True).wait()
            dist.reduce(mine, 2, group=group, async_op=True).wait()
        flat, after, before = torch.zeros(16), (self.rank + 1) % size, (self.rank - 1) % size
        works = [dist.isend(torch.arange(8.0), after), dist.irecv(flat[4:12], before)]
        for work in works:
            work.wait()
        flat.numpy()[:] = 1

    def groups(self):
        self.join()
        first, second = dist.new_group([0, 1], group_desc="dp"), dist.new_group([1, 2], group_desc="tp")
        for _ in range(3):
            if self.rank < 2:
                dist.all_reduce(ones(), group=first)
            if self.rank > 0:
                dist.broadcast(ones(), 2, group=second)
                got = torch.empty(1)
                if self.rank == 1:
                    dist.send(ones(1), 2, group=second)
                else:
                    dist.recv(got, 1, group=second)
        dist.destroy_process_group(first)

    def groups_with_a_name_again(self):
        self.join()
        dist.all_reduce(ones())
        dist.destroy_process_group()
        store = dist.FileStore(self.file_name + ".2", self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        dist.broadcast(ones(), 1)

    def ddp(self):
        self.join()
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()

    def uneven_inputs(self):
        """Each rank tells the others that it goes on, by work that nobody waits for in Python."""
        self.join()
        ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
        zero = ZeroRedundancyOptimizer(torch.nn.Linear(4, 2).parameters(), torch.optim.SGD, lr=0.1)
        with Join([ddp, zero]):
            for _ in range(2 + self.rank):
                ddp(ones()).sum().backward()
                zero.step()

    def models_whose_ranks_differ_for_a_time(self):
        """Nothing of it has parted: statistics, local and ignored parameters, averaging that comes later."""
        self.join()
        inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["2.weight", "2.bias"])
        ddp, local = DistributedDataParallel(inner), torch.nn.Linear(4, 4)
        statistics = DistributedDataParallel(torch.nn.BatchNorm1d(4), broadcast_buffers=False)
        averaged, hooked = (DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2))
        alone, _ = dist.new_subgroups(1)
        hooked.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=0), post_localSGD_hook)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        models = [statistics, averaged, hooked]
        torch.manual_seed(self.rank)
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
        for step in range(5):
            with ddp.no_sync() if step % 2 else contextlib.nullcontext(), averaged.no_sync():
                for model in (ddp, *models):
                    model(torch.randn(2, 4)).sum().backward()
            if step % 2 == 0:  # gradients are accumulated
                zero.step()
                zero.zero_grad()
            optimizer.step()
            for parameter in averaged.parameters() if step == 2 else ():
                dist.all_reduce(parameter.data, dist.ReduceOp.SUM)
                parameter.data /= self.world_size
            local(ones()).sum().backward()
            if self.rank == 1:
                torch.optim.SGD(local.parameters(), lr=0.1).step()

    def sharded_and_replicated(self):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        self.join()
        mesh = dist.init_device_mesh("cpu", (self.world_size,))
        whole = torch.arange(12.0).reshape(3, 4)
        parameters = [torch.nn.Parameter(distribute_tensor(whole, mesh, [how])) for how in (Shard(0), Replicate())]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(2):
            sum((parameter * parameter).sum() for parameter in parameters).full_tensor().backward()
            optimizer.step()

    def fsdp2(self):
        from torch.distributed.fsdp import fully_shard

        self.join()
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
        mesh = dist.init_device_mesh("cpu", (self.world_size,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    def dtensor(self):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        self.join()
        mesh = dist.init_device_mesh("cpu", (self.world_size,))
        whole = torch.arange(28.0).reshape(7, 4)
        for before in (Shard(0), Shard(1), Replicate()):
            for after in (Shard(0), Shard(1), Replicate()):
                found = distribute_tensor(whole, mesh, [before]).redistribute(placements=[after])
                self.assertEqual(found.full_tensor(), whole)

    def compiled(self):
        self.join()

        @torch.compile(backend="aot_eager")
        def step(tensor):
            dist.all_reduce(tensor)
            return tensor + 1

        self.assertEqual(step(ones()), 4 * ones())

    def autograd(self):
        import torch.distributed.nn.functional as differentiable

        self.join()
        leaf = ones().requires_grad_()
        differentiable.all_reduce(leaf * 2).sum().backward()
        self.assertEqual(leaf.grad, 6 * ones())
        with torch.inference_mode():
            got = torch.zeros(12)
            dist.all_gather_into_tensor(got, ones(), async_op=True).wait()

    def another_thread(self):
        self.join()
        thread = threading.Thread(target=lambda: dist.all_reduce(ones()))
        thread.start()
        thread.join()
        dist.all_reduce(ones())
        # Two threads with a group each: which one comes first is another one in each rank.
        first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
        issued, works = threading.Event(), []

        def save():
            works.append(dist.all_reduce(ones(), group=first, async_op=True))
            issued.set()

        thread = threading.Thread(target=save)
        if self.rank == 0:
            thread.start()
            issued.wait()
        works.append(dist.all_reduce(ones(), group=second, async_op=True))
        if self.rank != 0:
            thread.start()
        thread.join()
        for work in works:
            work.wait()

    def error_that_the_test_expects(self):
        self.join(timeout=timedelta(seconds=0.2))
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
        if self.rank == 0:
            with self.assertRaisesRegex(RuntimeError, "(?i)time|clos|reset"):
                dist.all_reduce(ones(), group=group)

    def error_of_a_wait_that_the_test_expects(self):
        """The others issue something else meanwhile."""
        self.join()
        store, others = dist.distributed_c10d._get_default_store(), dist.new_group([1, 2])
        if self.rank == 0:
            work = dist.all_reduce(ones(), async_op=True)
            with self.assertRaisesRegex(RuntimeError, "Operation timed out"):
                work.wait(timedelta(seconds=0.3))
            store.set("over", "")
        else:
            dist.all_reduce(ones(), group=others)
            store.wait(["over"])

    def error_of_the_arguments(self):
        self.join()
        with self.assertRaises((ValueError, RuntimeError)):
            dist.all_to_all_single(torch.empty(3), ones(3), [1, 1, 1], [1, 1, 5])
        dist.all_reduce(ones())

    def detail(self):
        self.join()
        dist.all_reduce(ones())
        dist.broadcast(ones(), 1)
        dist.barrier()

    def child_of_a_rank(self):
        self.join()
        pid = os.fork()
        if pid == 0:
            dist.all_reduce(ones(7), async_op=True)
            os._exit(0)
        os.waitpid(pid, 0)
        dist.all_reduce(ones())

    def fake_groups(self):
        from torch_testing_ext.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.world_size)
        got = torch.zeros(4 * self.world_size)
        dist.all_gather_into_tensor(got, ones(4))
        dist.all_reduce(ones(self.rank + 1))
        self.assertFalse(got.isnan().any())

    @collectives_may_differ("tests the decorator")
    def may_differ(self):
        self.join()
        dist.all_reduce(ones(), dist.ReduceOp.MAX if self.rank else dist.ReduceOp.SUM)

    def slow_peer(self):
        """The others wait until the parent has looked at their logs many times."""
        self.join()
        if self.rank == 0:
            threading.Event().wait(0.5)
            dist.send(ones(), 1)
        elif self.rank == 1:
            dist.recv(torch.empty(4), 0)
        dist.all_reduce(ones())


@sanitize("all", "races")
class SoundPersistent(MultiProcContinuousTest):
    world_size = WORLD_SIZE

    def first(self):
        dist.all_reduce(ones())
        dist.send(ones(), 1) if self.rank == 0 else dist.recv(torch.empty(4), 0) if self.rank == 1 else None

    def second(self):
        dist.broadcast(ones(), 2)
        self.group = dist.new_group([0, 2])
        if self.rank != 1:
            dist.all_reduce(ones(), group=self.group)


class NotSanitized(MultiProcContinuousTest):
    """One task after another that is sanitized."""

    world_size = WORLD_SIZE

    @sanitize()
    def with_it(self):
        from torch_testing_ext._torch.operations import operation_hook

        self.assertTrue(operation_hook.hook.is_installed)
        dist.all_reduce(ones())

    def without_it(self):
        from torch_testing_ext._torch.operations import operation_hook

        self.assertFalse(operation_hook.hook.is_installed)
        self.assertEqual(type(dist.distributed_c10d.Work.wait).__name__, "instancemethod")
        dist.all_reduce(ones(), dist.ReduceOp.MAX if self.rank else dist.ReduceOp.SUM)


@sanitize("all", "races")
class SoundThreaded(MultiThreadedTestCase):
    world_size = WORLD_SIZE

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def collectives(self):
        dist.all_reduce(ones(), dist.ReduceOp.MAX)
        dist.broadcast(ones(), 1)
        dist.reduce_scatter_tensor(torch.empty(1), ones(3))
        dist.all_to_all_single(torch.empty(3), ones(3))
        scattered = torch.empty(4)
        dist.scatter(scattered, [ones() for _ in range(3)] if self.rank == 2 else None, src=2)


OWN = [
    *((Sound, name) for name, value in vars(Sound).items() if callable(value) and name not in ("setUp", "join")),
    *((SoundPersistent, name) for name in ("first", "second")),
    (SoundThreaded, "collectives"),
]


class SoundProgramsTest(unittest.TestCase):
    def check(self, cls, name):
        environ = {"TORCH_TESTING_EXT_SANITIZE_ORDER": "fail"}
        if name == "detail":
            environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        with mock.patch.object(ranked_test_case, "TIMEOUT_DEFAULT", 120.0), mock.patch.dict(os.environ, environ):
            outcome, message = outcome_with_tear_down(cls(name))
        self.assertEqual(outcome, "passed", message)

    def test_the_hook_is_there_only_while_a_test_is_sanitized(self):
        result = unittest.TestResult()
        unittest.TestSuite([NotSanitized("with_it"), NotSanitized("without_it"), NotSanitized("with_it")]).run(result)
        self.assertEqual(result.failures + result.errors, [])
        self.assertEqual(result.testsRun, 3)

    def test_opposite_orders_are_a_warning(self):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            outcome, message = outcome_with_tear_down(Hazard("opposite_orders_that_pass"))
        self.assertEqual(outcome, "passed", message)
        self.assertIn("ranks 0, 1 issue collectives in opposite orders", said.getvalue())
        self.assertIn("planted_sanitized.py:", said.getvalue())

    @pytest.mark.slow
    def test_an_error_that_is_caught_is_no_warning(self):
        """The test may expect it, whatever its source looks like."""
        for base in (Hazard, HazardOfRecorder):
            for name in ("caught", "dropped_by_a_return", "expected"):
                with self.subTest(base=base, name=name), contextlib.redirect_stderr(io.StringIO()) as said:
                    outcome, message = outcome_with_tear_down(base(name))
                    self.assertEqual((outcome, message), ("passed", ""))
                    self.assertEqual(said.getvalue(), "")

    def test_an_error_of_a_wait_that_is_caught(self):
        """The sanitizer sees it. gloo's recorder may tell some milliseconds later that the collective is over."""
        for base in (Hazard, HazardOfRecorder):
            with self.subTest(base=base), contextlib.redirect_stderr(io.StringIO()) as said:
                outcome, message = outcome_with_tear_down(base("caught_at_the_wait"))
                self.assertEqual((outcome, message), ("passed", ""))
                if base is Hazard or "rank 1 left before all_reduce #1" not in said.getvalue():
                    self.assertEqual(said.getvalue(), "")

    def test_an_error_of_the_sanitizer_is_an_error_of_the_test(self):
        for name in ("failing_recorder", "failing_recorder_that_is_caught"):
            with self.subTest(name):
                outcome, message = outcome_with_tear_down(Broken(name))
                self.assertEqual(outcome, "error", message)
                self.assertIn("ZeroDivisionError: no site", message)

    def test_a_handler_of_the_test_may_raise_in_between(self):
        outcome, message = outcome_with_tear_down(Broken("handler_that_raises"))
        self.assertEqual(outcome, "passed", message)


class HazardOfRecorder(Fresh):
    """Only torch's recorder knows the calls."""

    @in_fresh_ranks
    def dropped_by_a_return(self):
        def reduce():
            try:
                dist.all_reduce(ones())
            finally:
                return  # noqa: B012

        if self.rank != 1:
            reduce()

    @in_fresh_ranks
    def caught_at_the_wait(self):
        if self.rank != 1:
            work = dist.all_reduce(ones(), async_op=True)
            with contextlib.suppress(RuntimeError):
                work.wait()

    @in_fresh_ranks
    def caught(self):
        if self.rank == 0:
            try:
                dist.all_reduce(ones())
            except RuntimeError as error:
                self.assertTrue(str(error))
        elif self.rank == 2:
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(ones())

    @in_fresh_ranks
    def expected(self):
        """By the test's own assertion, or by a time-out that the test has set."""
        late = dist.new_group(timeout=timedelta(seconds=0.2))
        if self.rank == 0:
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(ones(), group=late)
        if self.rank == 2:
            with self.assertRaises(RuntimeError):
                dist.all_reduce(ones())


@sanitize("order")
class Hazard(HazardOfRecorder):
    opposite_orders_that_pass = in_fresh_ranks(FAULTS["opposite_orders_that_pass"].body)


@sanitize()
class Broken(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def break_recorder(self):
        from torch_testing_ext._collectives.sanitizer import call_recorder

        # Compiled with the name of the module, as if the fault were there.
        names = {}
        code = "def place_of(self, frame): raise ZeroDivisionError('no site')"
        exec(compile(code, call_recorder.__file__, "exec"), names)
        call_recorder.CallRecorder._place_of = names["place_of"]

    def failing_recorder(self):
        self.join()
        self.break_recorder()
        dist.all_reduce(ones())

    def failing_recorder_that_is_caught(self):
        self.join()
        self.break_recorder()
        with self.assertRaises(ZeroDivisionError):
            dist.all_reduce(ones())

    def handler_that_raises(self):
        """As a handler of a signal would, in the middle of the recorder."""
        from torch_testing_ext._collectives.sanitizer import call_recorder

        self.join()
        place_of = call_recorder.CallRecorder._place_of

        def interrupted(*_):
            raise TimeoutError("of the test")

        call_recorder.CallRecorder._place_of = interrupted
        with self.assertRaisesRegex(TimeoutError, "of the test"):
            dist.all_reduce(ones())
        call_recorder.CallRecorder._place_of = place_of
        dist.barrier()


for _cls, _name in OWN:
    setattr(
        SoundProgramsTest,
        f"test_{_cls.__name__}_{_name}",
        lambda self, cls=_cls, name=_name: self.check(cls, name),
    )


if __name__ == "__main__":
    run_tests()
