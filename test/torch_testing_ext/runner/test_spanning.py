"""Tests with ranks on several nodes: pretended ones, each an agent with an address of its own."""

import os
import signal
import threading
import unittest

from agents_support import Nodes
from processes_support import is_alive

from torch_testing_ext._process import reaping
from torch_testing_ext.common_utils import run_tests

HEAD = """
import os, sys, time, unittest, torch, torch.distributed as dist
from torch.distributed import FileStore
from torch_testing_ext.common_distributed import MultiProcessTestCase, multi_node, sanitize, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import timeout
class Base(MultiProcessTestCase):
    world_size = 4
    def setUp(self):
        super().setUp()
        os.environ["OF_THE_PARENT"] = str(os.getpid())
        os.environ.pop("HOME", None)
        self._spawn_processes()
    def begin(self):
        dist.init_process_group(
            "gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=self.world_size
        )
"""
ENDS = (
    HEAD
    + """
@multi_node
class T(Base):
    def test_file_store(self):
        store = FileStore(self.file_name, 4)
        self.assertEqual(store.path, self.file_name)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=4)
        got = [None] * 4
        place = {name: os.environ.get(name) for name in (
            "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR",
            "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_TESTING_EXT_FAKE_DEVICES", "OF_THE_PARENT", "HOME",
        )}
        dist.all_gather_object(got, (place, os.getppid()))
        if self.rank == 0:
            print(got)
    def test_url_again_and_again(self):
        for _ in range(3):
            self.begin()
            dist.barrier()
            dist.destroy_process_group()
    def test_env(self):
        dist.init_process_group("gloo")
        tensor = torch.ones(1) * self.rank
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 6)
    def test_leaves_at_once(self):
        self.begin()
    def test_fails(self): self.assertNotEqual(self.rank, 3)
    def test_skips(self): self.skipTest("all ranks say so")
    def test_one_skips(self):
        if self.rank == 2: self.skipTest("a reason")
    def test_exits(self):
        if self.rank == 3: os._exit(0)
    def test_is_killed(self):
        self.begin()
        dist.barrier()
        if self.rank == 2: os.kill(os.getpid(), 9)
        dist.barrier()
    def test_disagrees(self):
        self.begin()
        dist.barrier()
        if self.rank == 3: dist.all_reduce(torch.ones(3))
        dist.barrier()
    @sanitize()
    def test_roots_disagree(self):
        self.begin()
        dist.broadcast(torch.ones(2), src=0 if self.rank != 3 else 1)
    @timeout(3)
    def test_hangs(self):
        if self.rank == 3: time.sleep(1000)
    def test_prints(self):
        print("x" * 1000)
        print(f"rank {self.rank} was here")
        self.assertExpectedInline("a" if self.rank != 3 else "b", "a")
    @skip_if_lt_x_gpu(3)
    def test_counts_the_devices_of_all_nodes(self): print("three are enough")
class Parent(Base):
    @multi_node
    def test_kills_a_rank(self): time.sleep(0 if self.rank != 3 else 1000)
    def setUp(self):
        super().setUp()
        self.processes[3].kill()
class Unmarked(Base):
    def test_is_on_one_node(self): self.assertNotIn("GROUP_RANK", os.environ)
def make_class():
    @multi_node
    class Local(Base):
        def test_local_class(self): pass
    return Local
Local = make_class()
class Own(Base):
    def _start_processes(self, proc): super()._start_processes(proc)
    @multi_node
    def test_starts_its_ranks_itself(self): self.assertNotIn("GROUP_RANK", os.environ)
"""
)
BASES = (
    HEAD
    + """
from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiThreadedTestCase
from torch_testing_ext.common_fsdp import FSDPTest
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch.distributed.tensor import Shard, distribute_tensor
class OfDTensor(DTensorTestBase):
    world_size, device_type = 4, "cpu"
    @multi_node
    @with_comms
    def test_dtensor(self):
        print(os.environ["GROUP_RANK"])
        self.assertEqual(distribute_tensor(torch.ones(8), self.build_device_mesh(), [Shard(0)]).full_tensor().sum(), 8)
class OfFSDP(FSDPTest):
    @multi_node
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fsdp(self):
        print(os.environ["GROUP_RANK"])
        dist.barrier()
@multi_node
class Persistent(MultiProcContinuousTest):
    world_size = 4
    backend_str = classmethod(lambda cls: "gloo")
    def test_persistent(self): self.assertNotIn("GROUP_RANK", os.environ)
    @skip_if_lt_x_gpu(4)
    def test_too_wide(self): pass
class Threads(MultiThreadedTestCase):
    world_size = 4
    def setUp(self):
        super().setUp()
        self._spawn_threads()
    @multi_node
    def test_threads(self): dist.barrier()
@multi_node
class Plain(unittest.TestCase):
    def test_plain(self): pass
@multi_node
class Own(Base):
    def _spawn_processes(self): super()._spawn_processes()
    def test_own(self): self.assertNotIn("GROUP_RANK", os.environ)
"""
)
WAITS = (
    HEAD
    + """
@multi_node
class T(Base):
    world_size = 4
    def test_waits(self):
        self.begin()
        dist.barrier()
        if self.rank == 0:
            with open({count!r}, "a+") as count:
                count.write("x")
                count.seek(0)
                waits = len(count.read()) <= {times}
        told = [waits if self.rank == 0 else None]
        dist.broadcast_object_list(told)
        if told[0]:
            with open({fifo!r} + str(self.rank), "w") as fifo:
                print(os.getpid(), file=fifo)
            time.sleep(1000)
"""
)


def read_pid(fifo):
    with open(fifo) as file:
        return int(file.read())


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def warnings_of(nodes):
    return [text for text in nodes.said if not text.startswith("waiting for")]


def setUpModule():
    global NODES
    NODES = Nodes("a", "b", "c", fake_devices=("0", "1"))
    NODES.__enter__()
    unittest.addModuleCleanup(NODES.__exit__)


class BasesTest(unittest.TestCase):
    """Test classes other than MultiProcessTestCase itself."""

    @classmethod
    def setUpClass(cls):
        cls.file = NODES.write(BASES)
        cls.ran = NODES.run(cls.file)

    def test_bases_with_fresh_ranks(self):
        for name in "test_dtensor", "test_fsdp":
            (attempt,) = self.ran.attempts[name]
            self.assertEqual(attempt.outcome.value, "passed", attempt.message)
            self.assertEqual([rank.output.strip() for rank in attempt.ranks], ["0", "0", "1", "1"])

    def test_others_stay_on_one_node(self):
        for name in "test_persistent", "test_threads", "test_plain", "test_own":
            (attempt,) = self.ran.attempts[name]
            self.assertEqual(attempt.outcome.value, "passed", attempt.message)
            self.assertEqual(len(attempt.lease.parts), 1)
        (attempt,) = self.ran.attempts["test_too_wide"]
        self.assertEqual(
            attempt.message,
            "needs 4 devices, 2 available on one node (@multi_node has no effect: its ranks persist for a class)",
        )

    def test_warnings(self):
        found = NODES.place.discover((self.file,), 2)
        self.assertEqual(
            sorted(text.replace(self.file, "file") for text in found.warnings),
            [
                "@multi_node has no effect on file::Own::test_own: its class starts its ranks itself",
                "@multi_node has no effect on file::Persistent::test_persistent and 1 more: "
                "its ranks persist for a class",
                "@multi_node has no effect on file::Plain::test_plain: it is no MultiProcessTestCase",
                "@multi_node has no effect on file::Threads::test_threads: its ranks are threads",
            ],
        )


class EndsTest(unittest.TestCase):
    """All kinds of ends, in one run."""

    @classmethod
    def setUpClass(cls):
        cls.ran = NODES.run(NODES.write(ENDS))
        cls.is_free, cls.said = NODES.is_free, warnings_of(NODES)

    def test_outcomes(self):
        expected = {
            "test_file_store": "passed",
            "test_url_again_and_again": "passed",
            "test_env": "passed",
            "test_leaves_at_once": "passed",
            "test_fails": "failed",
            "test_skips": "skipped",
            "test_one_skips": "failed",
            "test_exits": "crashed",
            "test_is_killed": "crashed",
            "test_disagrees": "failed",
            "test_roots_disagree": "failed",
            "test_local_class": "error",
            "test_hangs": "timeout",
            "test_prints": "failed",
            "test_kills_a_rank": "crashed",
            "test_is_on_one_node": "passed",
            "test_starts_its_ranks_itself": "passed",
        }
        self.assertEqual({name: outcome for name, outcome in self.ran.outcomes.items() if name in expected}, expected)
        self.assertTrue(self.is_free)
        self.assertEqual(self.said, [])

    def test_leases_are_on_both_nodes(self):
        for name, attempts in self.ran.attempts.items():
            if name in ("test_is_on_one_node", "test_starts_its_ranks_itself"):
                self.assertEqual([part.node for part in attempts[0].lease.parts if part.others], [])
            else:
                self.assertEqual([part.node for part in attempts[0].lease.parts], ["a", "b"], name)

    def test_places_of_ranks(self):
        (line,) = self.ran["test_file_store"].ranks[0].output.splitlines()
        places = eval(line)
        parents = {parent for _, parent in places}
        self.assertEqual(len(parents), 2)
        for rank, (place, _) in enumerate(places):
            self.assertEqual(place["RANK"], str(rank))
            self.assertEqual((place["GROUP_RANK"], place["LOCAL_RANK"]), (str(rank // 2), str(rank % 2)))
            self.assertEqual(
                [place[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")], ["4", "2", "2"]
            )
            self.assertEqual((place["MASTER_ADDR"], place["GLOO_SOCKET_IFNAME"]), ("127.0.0.2", "lo"))
            self.assertEqual(place["NCCL_SOCKET_IFNAME"], "lo")
            self.assertEqual(place["TORCH_TESTING_EXT_FAKE_DEVICES"], "0,1")
            self.assertIsNone(place["HOME"])
        self.assertEqual(len({place["OF_THE_PARENT"] for place, _ in places}), 1)

    def test_a_rank_fails(self):
        message = self.ran["test_fails"].message
        self.assertIn("rank 3 of 4 failed", message)
        self.assertIn("in test_fails", message)
        self.assertIn("ranks 0, 1 on node a, ranks 2, 3 on node b", message)

    def test_a_rank_is_killed(self):
        message = self.ran["test_is_killed"].message
        self.assertIn("rank 2 of 4 was killed by SIGKILL", message)
        self.assertIn("follows from rank 2", message)
        self.assertIn("rank 3 of 4 was killed by SIGKILL", self.ran["test_kills_a_rank"].message)

    def test_a_disagreement(self):
        message = self.ran["test_disagrees"].message
        self.assertIn("rank 3 calls all_reduce [3] float32, ranks 0, 1, 2 call barrier", message)
        self.assertLess(self.ran["test_disagrees"].seconds, 20)
        message = self.ran["test_roots_disagree"].message
        self.assertIn("rank 3 calls broadcast [2] float32 root 1, ranks 0, 1, 2 call broadcast", message)

    def test_a_class_that_other_nodes_lack(self):
        self.assertIn("other nodes do not have this class", self.ran["test_local_class"].message)

    def test_a_hang_shows_the_stack_of_the_other_node(self):
        message = self.ran["test_hangs"].message
        self.assertRegex(message, r"rank 3: test_\d+.py:\d+ in test_hangs")
        self.assertIn("rank 3's stacks", message)

    def test_output_and_expectations_of_the_other_node(self):
        attempt = self.ran["test_prints"]
        self.assertIn("rank 3 was here", attempt.ranks[3].output)
        self.assertIn("rank 3", attempt.message)

    def test_needs_count_the_devices_of_all_nodes(self):
        self.assertEqual(self.ran.outcomes["test_counts_the_devices_of_all_nodes"], "passed")
        self.assertIn("three are enough", self.ran["test_counts_the_devices_of_all_nodes"].ranks[3].output)


class OnCpuTest(unittest.TestCase):
    def test_more_ranks_than_slots(self):
        source = HEAD.replace("skip_if_lt_x_gpu", "requires_gloo") + (
            "@multi_node\n"
            "class T(Base):\n"
            "    world_size = 5\n"
            "    @requires_gloo()\n"
            "    def test_five(self):\n"
            "        self.begin()\n"
            "        dist.barrier()\n"
            "        print(os.environ['GROUP_RANK'])\n"
            "class Narrow(Base):\n"
            "    world_size = 2\n"
            "    @requires_gloo()\n"
            "    def test_two(self): self.assertNotIn('GROUP_RANK', os.environ)\n"
        )
        ran = NODES.run(NODES.write(source))
        self.assertEqual(ran.outcomes, {"test_five": "passed", "test_two": "passed"}, ran["test_five"].message)
        self.assertEqual([rank.output.strip() for rank in ran["test_five"].ranks], ["0", "0", "1", "1", "2"])
        self.assertEqual([len(part.slots) for part in ran["test_five"].lease.parts], [2, 2, 1])


class FaultsTest(unittest.TestCase):  # the last one: it leaves one node
    """What dies while all ranks wait, on three nodes, of which two are needed."""

    def run_and_hit(self, *hits):
        """Each of `hits(pids)` is called when all ranks wait. Returns what ran."""
        fifo, pids = str(NODES.root / self.id()), []
        for rank in range(4):
            os.mkfifo(f"{fifo}{rank}")
        source = WAITS.replace("{count!r}", repr(f"{fifo}.count"))
        file = NODES.write(source.replace("{fifo!r}", repr(fifo)).replace("{times}", str(len(hits))))

        def wait_and_hit():  # in a thread: run_test.py carries the messages that start the ranks
            for hit in hits:
                pids.extend(read_pid(f"{fifo}{rank}") for rank in range(4))
                hit(pids[-4:])

        thread = threading.Thread(target=wait_and_hit)
        thread.start()
        ran = NODES.run(file)
        thread.join()
        reaping.wait_until_gone(pids, 10.0)  # those of an agent that was killed end with it, a moment later
        self.assertEqual([pid for pid in pids if is_alive(pid)], [])
        self.assertTrue(NODES.is_free)
        return ran

    def test_a_fork_server_is_killed(self):
        ran = self.run_and_hit(lambda pids: os.kill(parent_of(pids[3]), signal.SIGKILL))
        (attempt,) = ran.attempts["test_waits"]
        self.assertEqual((attempt.outcome.value, warnings_of(NODES)), ("error", []))
        self.assertIn("node b: the process that starts the ranks there was killed by SIGKILL", attempt.message)
        self.assertNotIn("rank 0: lost", attempt.message)

    def test_agents_are_killed(self):
        """The first time, one beside the main process; the second time, that of the main process."""
        ran = self.run_and_hit(
            lambda pids: os.kill(NODES.pid("b"), signal.SIGKILL),
            lambda pids: os.kill(NODES.pid("a"), signal.SIGKILL),
        )
        (attempt,) = ran.attempts["test_waits"]
        lost = [f"node {name} was lost: its agent was killed by SIGKILL" for name in "ba"]
        self.assertEqual((attempt.outcome.value, attempt.number), ("crashed", 1))
        self.assertEqual([part.node for part in attempt.lease.parts], ["a", "c"])
        for text in lost:
            self.assertIn(text, attempt.message)
        self.assertTrue(any("test_waits runs again, as the same attempt" in text for text in ran.summary.warnings))


if __name__ == "__main__":
    run_tests()
