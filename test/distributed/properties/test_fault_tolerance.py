"""Ranks that lose one of them: what an operation of gloo does in the survivors, and how training goes on."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.faults import call, calls, fault_point, fault_sweep, faults, kill, mark, reached, restart, stop

LOST = 2
ERROR, RETURNS, EITHER = "error", "returns", "error or returns"


def tensors(count=3):
    return [torch.ones(2) for _ in range(count)]


# By operation: what it is, and what it does in rank 0 and in rank 1 when rank 2 is gone.
AFTER_LOSS = {
    "reduce": (lambda rank: dist.reduce(torch.ones(2), 0), ERROR, ERROR),
    "broadcast from another rank": (lambda rank: dist.broadcast(torch.ones(2), 0), ERROR, EITHER),
    "scatter from another rank": (lambda rank: dist.scatter(torch.ones(2), None if rank else tensors()), ERROR, EITHER),
    "scatter from the lost rank": (lambda rank: dist.scatter(torch.ones(2), None, LOST), ERROR, ERROR),
    "gather to the lost rank": (lambda rank: dist.gather(torch.ones(2), None, LOST), ERROR, ERROR),
    "send to the lost rank": (lambda rank: dist.send(torch.ones(2), LOST), ERROR, ERROR),
    "all_reduce": (lambda rank: dist.all_reduce(torch.ones(2)), ERROR, ERROR),
    "all_gather": (lambda rank: dist.all_gather(tensors(), torch.ones(2)), ERROR, ERROR),
    "all_gather_object": (lambda rank: dist.all_gather_object([None] * 3, rank), ERROR, ERROR),
    "reduce_scatter": (lambda rank: dist.reduce_scatter(torch.ones(2), tensors()), ERROR, ERROR),
    "all_to_all_single": (lambda rank: dist.all_to_all_single(torch.ones(3), torch.ones(3)), ERROR, ERROR),
    "barrier": (lambda rank: dist.barrier(), ERROR, ERROR),
    "broadcast from the lost rank": (lambda rank: dist.broadcast(torch.ones(2), LOST), ERROR, ERROR),
    "receive from the lost rank": (lambda rank: dist.recv(torch.ones(2), LOST), ERROR, ERROR),
    "gather to rank 0": (lambda rank: dist.gather(torch.ones(2), None if rank else tensors()), ERROR, RETURNS),
    "send and receive between the others": (lambda rank: _between_the_others(rank), RETURNS, RETURNS),
    "new_group of the others": (lambda rank: dist.new_group([0, 1]), RETURNS, RETURNS),
    "destroy_process_group": (lambda rank: dist.destroy_process_group(), RETURNS, RETURNS),
}
TIMEOUT = timedelta(seconds=0.3)


def _between_the_others(rank):
    if rank:
        dist.recv(torch.ones(2), 0)
    else:
        dist.send(torch.ones(2), 1)


class Survivors(MultiProcessTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join(self, name="first", size=3, seconds=60):
        store = dist.FileStore(f"{self.file_name}.{name}", size)
        timeout = timedelta(seconds=seconds)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size, timeout=timeout)

    def lose(self, **options):
        """Rank 2 is gone when this returns."""
        self.join(**options)
        pid = [os.getpid()]
        dist.broadcast_object_list(pid, LOST)
        dist.barrier()
        fault_point("gone")
        self.wait_until(lambda: not Path(f"/proc/{pid[0]}").exists())

    def wait_until(self, holds):
        while not holds():
            time.sleep(0.001)


@requires_gloo()
class TestSurvivorsOfGloo(Survivors):
    """Each operation after a loss."""

    @faults(kill(LOST, at=mark("gone")), within=30)
    def test_monitored_barrier_does_not_name_a_dead_rank(self):
        self.lose()
        if self.rank == 0:
            with self.assertRaisesRegex(RuntimeError, "Connection (closed|reset) by peer"):
                dist.monitored_barrier(timeout=timedelta(seconds=10))

    @faults(stop(rank=LOST, at=mark("still")), within=30)
    def test_monitored_barrier_names_a_rank_that_stands_still(self):
        self.join()
        dist.barrier()
        fault_point("still")
        told = f"[Rr]ank {LOST} failed to pass" if self.rank == 0 else ""
        with self.assertRaisesRegex(RuntimeError, told):
            dist.monitored_barrier(timeout=timedelta(seconds=0.5))

    @faults(kill(LOST, at=mark("gone")), within=30)
    def test_new_group_of_all_waits_for_its_own_timeout(self):
        """Not for that of the group before, and without one for half an hour."""
        self.lose()
        with self.assertRaisesRegex(RuntimeError, "Wait timeout"):
            dist.new_group([0, 1, LOST], timeout=TIMEOUT)

    @faults(stop(rank=LOST, at=mark("still")), within=30)
    def test_new_world_without_a_rank_that_stands_still(self):
        self.join()
        dist.barrier()
        fault_point("still")
        dist.destroy_process_group()
        self.join("second", 2)
        dist.barrier()

    @unittest.skipUnless(hasattr(dist, "shrink_group"), "this torch has no shrink_group")
    @faults(kill(LOST, at=mark("gone")), within=30)
    def test_gloo_cannot_shrink_a_group(self):
        """NCCL can. gloo can only reconfigure it, in newer versions."""
        self.lose()
        with self.assertRaisesRegex(TypeError, "does not support shrinking"):
            dist.shrink_group([LOST])

    def what_it_does(self, operation):
        try:
            operation(self.rank)
        except RuntimeError as error:
            return ERROR, str(error)
        return RETURNS, ""

    def stay(self):
        """Rank 0 is there until rank 1 has come through: one that leaves with an error would fail that, too."""
        through = Path(f"{self.file_name}.through")
        if self.rank == 1:
            through.touch()
        self.wait_until(through.exists)


def _test_of(name):
    operation, *expected = AFTER_LOSS[name]

    @faults(kill(LOST, at=mark("gone")), within=30)
    def test(self):
        self.lose()
        did, _ = self.what_it_does(operation)
        if expected[1] == RETURNS:
            self.stay()
        self.assertIn(did, expected[self.rank])

    return test


def _test_of_standstill(name):
    """What is an error when the rank is dead is a time-out then, and what works, works."""
    operation, *expected = AFTER_LOSS[name]

    @faults(stop(rank=LOST, at=mark("still")), within=30)
    def test(self):
        # The time-out of messages is that with which the group was made.
        is_message = name in ("send to the lost rank", "receive from the lost rank")
        self.join(seconds=2 if is_message else 60)
        dist.barrier()
        if ERROR in expected and not is_message:
            # Only now: until here, a busy machine may take its time.
            dist.distributed_c10d._set_pg_timeout(TIMEOUT)
        fault_point("still")
        did, text = self.what_it_does(operation)
        self.assertIn(did, expected[self.rank])
        if did == ERROR:
            # It has timed out, or the other one has and is gone.
            self.assertRegex(text, "[Tt]imed out|timeout|Connection closed")

    return test


for _name in AFTER_LOSS:
    setattr(TestSurvivorsOfGloo, f"test_{_name.replace(' ', '_')}", _test_of(_name))
    setattr(TestSurvivorsOfGloo, f"test_standstill_{_name.replace(' ', '_')}", _test_of_standstill(_name))


class Writer(dcp.FileSystemWriter):
    def write_data(self, *args, **options):
        fault_point("writing")
        return super().write_data(*args, **options)

    def finish(self, *args, **options):
        """In the coordinator: all data are written, and nothing says so yet."""
        fault_point("finishing")
        super().finish(*args, **options)


@requires_gloo()
class TestRecovery(Survivors):
    """How training goes on."""

    def survive(self):
        self.join()
        with self.assertRaises(RuntimeError):
            for _ in range(4):
                dist.all_reduce(torch.ones(1))

    def form_a_new_world(self):
        dist.destroy_process_group()
        self.join("second", 2)
        total = torch.ones(1)
        dist.all_reduce(total)
        self.assertEqual(total.item(), 2)
        reached("a new world")

    @faults(kill(LOST, at=call(3, "all_reduce")), within=30, must_reach=["a new world"])
    def test_new_world_after_a_loss_before_a_call(self):
        self.survive()
        self.form_a_new_world()

    @faults(kill(LOST, at=call(3, "all_reduce", phase="during")), within=30, must_reach=["a new world"])
    def test_new_world_after_a_loss_during_a_call(self):
        self.survive()
        self.form_a_new_world()

    @fault_sweep(kill, at=calls(), ranks=[1, LOST], within=30)
    def test_no_loss_hangs(self):
        self.join()
        try:
            for _ in range(2):
                dist.all_reduce(torch.ones(1))
            dist.broadcast(torch.ones(1), 0)
        except RuntimeError:
            reached("the loss is seen")

    @faults(kill(LOST, at=mark("step", 3)), restart(LOST), within=60, must_reach=["loaded"])
    def test_restarted_rank_rejoins_from_a_checkpoint(self):
        checkpoints = Path(f"{self.file_name}.checkpoints")
        state = {"step": torch.zeros(1), "sum": torch.zeros(1)}
        if not self.incarnation:
            self.join()
            if self.train(state, checkpoints):
                return
            dist.destroy_process_group()
        self.join("second")
        newest = max(file.parent.name for file in checkpoints.glob("*/.metadata"))
        dcp.load(state, checkpoint_id=checkpoints / newest)
        reached("loaded")
        self.assertTrue(self.train(state, checkpoints))
        self.assertEqual(state["sum"].item(), 3 * 4)

    def train(self, state, checkpoints):
        """Returns whether all four steps are done."""
        try:
            while state["step"] < 4:
                fault_point("step")
                one = torch.ones(1)
                dist.all_reduce(one)
                state["sum"] += one
                state["step"] += 1
                dcp.save(state, checkpoint_id=checkpoints / str(int(state["step"])))
        except (RuntimeError, dcp.api.CheckpointException):
            return False
        return True

    @faults(kill(LOST, at=mark("writing", 2)), within=60, must_reach=["not whole"])
    def test_checkpoint_whose_writer_dies_is_not_whole(self):
        self.write_two(lambda state, folder: dcp.save(state, storage_writer=Writer(folder)))

    @faults(kill(LOST, at=mark("writing", 2)), within=60, must_reach=["not whole"])
    def test_asynchronous_checkpoint_whose_writer_dies_is_not_whole(self):
        self.write_two(lambda state, folder: dcp.async_save(state, storage_writer=Writer(folder)).result())

    @faults(kill(0, at=mark("finishing", 2)), within=60, must_reach=["not whole"])
    def test_checkpoint_whose_coordinator_dies_is_not_whole(self):
        self.write_two(lambda state, folder: dcp.save(state, storage_writer=Writer(folder)))

    def write_two(self, save):
        self.join()
        folders = [Path(f"{self.file_name}.{name}") for name in ("whole", "half")]
        save({"weight": torch.ones(2) * 1}, folders[0])
        with self.assertRaises((RuntimeError, dcp.api.CheckpointException)):
            save({"weight": torch.ones(2) * 2}, folders[1])
        self.assertFalse((folders[1] / ".metadata").exists())
        state = {"weight": torch.zeros(2)}
        with self.assertRaises((RuntimeError, OSError, dcp.api.CheckpointException)):
            dcp.load(state, checkpoint_id=folders[1], no_dist=True)
        dcp.load(state, checkpoint_id=folders[0], no_dist=True)
        self.assertEqual(state["weight"], torch.ones(2))
        reached("not whole")


# Adds up ones over all ranks in four steps, with a checkpoint after each. In the first start, rank 1 dies in the third.
# torchrun's own store, in which ranks meet by default, is the same for all starts, and torch's keys are, too: there,
# ranks would find the addresses of ranks that are gone, and wait for these or fail (seen with torch 2.13).
RESTARTED = """
import os, signal, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist

folder, start = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore(f"start {start}", store)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
newest = folder / "checkpoint"
state = torch.load(newest) if newest.exists() else {"step": 0, "sum": torch.zeros(1)}
first = state["step"]
for state["step"] in range(first + 1, 5):
    if (rank, start, state["step"]) == (1, 0, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    one = torch.ones(1)
    dist.all_reduce(one)
    state["sum"] += one
    if rank == 0:
        torch.save(state, folder / "new")
        os.replace(folder / "new", newest)
    dist.barrier()
(folder / f"rank {rank}").write_text(f"start {start} after step {first}: sum {state['sum'].item():g}")
dist.destroy_process_group()
"""


@requires_gloo()
class TestTorchrun(TestCase):
    def test_killed_rank_resumes_from_its_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "train.py")
            script.write_text(RESTARTED)
            words = [
                "--standalone",
                "--nproc-per-node=2",
                "--max-restarts=1",
                f"--log-dir={folder}/logs",
                str(script),
                folder,
            ]
            command = [sys.executable, "-m", "torch.distributed.run", *words]
            agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                output, _ = agent.communicate(timeout=240)
            finally:
                # It ends its ranks.
                agent.send_signal(signal.SIGTERM)
                agent.wait()
            self.assertEqual(agent.returncode, 0, output)
            told = {file.name: file.read_text() for file in Path(folder).glob("rank *")}
        self.assertEqual(told, {f"rank {rank}": "start 1 after step 2: sum 8" for rank in range(2)})


@requires_gloo()
@unittest.skipUnless(hasattr(dist, "_reconfigure"), "this torch has no _reconfigure")
class TestReconfigure(Survivors):
    """The group of all ranks goes on without a rank that really dies, or with a new process of it."""

    def join_reconfigurable(self):
        self.store = dist.FileStore(f"{self.file_name}.first", self.world_size)
        dist.init_process_group(
            "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=60),
            enable_reconfigure=True,
        )

    def handles(self, name):
        """Those of all ranks."""
        self.store.set(f"{name} {self.rank}", dist._get_reconfigure_handle())
        return [self.store.get(f"{name} {rank}").decode() for rank in range(self.world_size)]

    def reconfigure(self, number, handles):
        dist._reconfigure(number, handles, timeout=timedelta(seconds=60)).wait()

    def expect_sum(self, size):
        total = torch.ones(1)
        dist.all_reduce(total)
        self.assertEqual(total.item(), size)

    def lose_one(self):
        """Returns the handles of the ranks that were there before."""
        self.join_reconfigurable()
        self.reconfigure(1, self.handles("first"))
        before = self.handles("before the loss")
        dist.all_reduce(torch.ones(1))
        # A survivor may wait for another one that has left the call with an error: gloo does not tell it, not even by
        # `abort`, and only the time-out ends that.
        backend = dist.get_backend_impl(dist.group.WORLD, torch.device("cpu"))
        backend.set_timeout(TIMEOUT)
        with self.assertRaises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        backend.set_timeout(timedelta(seconds=60))
        return before

    def go_on_without(self, victim):
        handles = self.lose_one()
        del handles[victim]
        self.reconfigure(2, handles)
        self.assertEqual(dist.get_rank(), self.rank - (self.rank > victim))
        self.expect_sum(2)
        reached("reconfigured")

    @faults(kill(LOST, at=call(2, "all_reduce")), restart(LOST), within=60, must_reach=["reconfigured"])
    def test_new_process_joins_the_group(self):
        if self.incarnation:
            self.join_reconfigurable()
        else:
            self.lose_one()
        self.reconfigure(2, self.handles("after the loss"))
        self.expect_sum(3)
        reached("reconfigured")


def _test_of_reconfigure(victim, phase):
    @faults(kill(victim, at=call(2, "all_reduce", phase=phase)), within=60, must_reach=["reconfigured"])
    def test(self):
        self.go_on_without(victim)

    return test


for _victim in range(3):
    for _phase in ("before", "during"):
        _name = f"test_rank_{_victim}_dies_{_phase}_a_call"
        setattr(TestReconfigure, _name, _test_of_reconfigure(_victim, _phase))


if __name__ == "__main__":
    run_tests()
