"""Groups that a test destroys: they end without gloo's waits, at the same moment and with the same effect."""

import os
import socket
import time
import unittest
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from multi_process_support import Ranks, check_held_backend, outcome_of, ranks_told

from torch_testing_ext._cases import group_creation, group_ends
from torch_testing_ext._process import system, wakeups
from torch_testing_ext.common_distributed import MultiProcContinuousTest
from torch_testing_ext.common_utils import TestCase, run_tests

real_waking = wakeups.waking


class Woken:
    """Counts the threads that are woken while groups end."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._patch = mock.patch.object(wakeups, "waking", self._waking)

    def _waking(self, threads: Any) -> Any:
        chosen = list(threads)
        self.counts.append(len(chosen))
        return real_waking(chosen)

    def __enter__(self) -> "Woken":
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def resources() -> list[int]:
    """How many sockets, pipes and the like this rank has, and how many threads.

    Files do not count: a rank that runs for a second opens one for its parent's look at it.
    """
    kinds = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            kinds.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [sum(not kind.startswith("/") for kind in kinds), len(os.listdir("/proc/self/task"))]


class Ending(Ranks):
    def join_group(self) -> None:
        self.file_name += "+"  # a store for each group, as none waits until its peers have left the last one
        super().join_group()

    def wait_for(self, name: str) -> None:
        path = Path(self.file_name).with_name(name)
        while not path.exists():
            time.sleep(0.001)

    def signal(self, name: str) -> None:
        Path(self.file_name).with_name(name).touch()

    def leaves_nothing(self) -> None:
        self.join_group()
        dist.destroy_process_group()  # torch loads what it needs once
        before = resources()
        for _ in range(5):
            self.join_group()
            dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
            self.assertEqual(resources(), before)
            self.assertFalse(dist.is_initialized())
            with self.assertRaisesRegex(ValueError, "not been initialized"):
                dist.all_reduce(torch.ones(1))

    def threads_woken(self) -> None:
        with Woken() as woken:
            self.join_group()
            dist.destroy_process_group()
            self.join_group()
            group = dist.new_group([0, 1])
            dist.barrier(group)  # with its real end, nobody waits until the peer has connected
            dist.destroy_process_group(group)
            del group
            dist.destroy_process_group()
        self.tell(woken.counts)

    def group_held_by_the_test(self) -> None:
        """As in PyTorch, it ends when the test lets it go."""
        with Woken() as woken:
            self.join_group()
            group = dist.new_group([0, 1])
            dist.destroy_process_group(group)
            dist.destroy_process_group()
            counts = [len(woken.counts)]
            tensor = torch.ones(1)
            group.allreduce([tensor]).wait()
            self.assertEqual(tensor.item(), 2)
            gone: list[str] = []
            seen = weakref.ref(group, lambda _: gone.append("gone"))
            del group
            self.assertEqual((seen(), gone), (None, ["gone"]))
            self.tell([*counts, len(woken.counts)])

    def a_peer_waits(self) -> None:
        """It sees that the connection is closed while the rank that closed it lives on."""
        self.join_group()
        dist.barrier()
        if self.rank == 0:
            dist.destroy_process_group()
            self.wait_for("seen")
        else:
            with self.assertRaises(RuntimeError):
                dist.all_reduce(torch.ones(1))
            self.signal("seen")

    def others_go_on(self) -> None:
        """Peers of a rank that has destroyed its group still talk to each other, and not to it."""
        self.join_group()
        dist.barrier()
        tensor = torch.full((1,), self.rank)
        if self.rank == 0:
            dist.destroy_process_group()
            self.wait_for("1")
            self.wait_for("2")
            return
        with self.assertRaises(RuntimeError):
            dist.recv(torch.ones(1), src=0)
        other = 3 - self.rank
        for _ in range(3):
            requests = [dist.isend(tensor, other), dist.irecv(received := torch.ones_like(tensor), other)]
            for request in requests:
                request.wait()
            self.assertEqual(received.item(), other)
        self.signal(str(self.rank))

    def work_that_is_not_done(self) -> None:
        """Torch finishes it before a group ends."""
        self.join_group()
        tensors = [torch.ones(1000) for _ in range(50)]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        dist.destroy_process_group()
        self.assertEqual(torch.stack(tensors).sum().item(), 2 * 50 * 1000)

    def stores_end(self) -> None:
        """The last rank removes the file of a FileStore; a TCPStore gives its port free.

        One after the other: torch may leave the file if two FileStores of it end in the same moment.
        """
        self.join_group()
        path = Path(self.file_name)
        dist.barrier()
        if self.rank == 1:
            self.wait_for("destroyed")
        self.assertTrue(path.exists())
        dist.destroy_process_group()
        self.signal("destroyed")
        if self.rank == 1:
            self.assertFalse(path.exists())
        if self.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = store.port
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            del store
            dist.destroy_process_group()
            with socket.create_server(("127.0.0.1", port)):
                pass

    def backends_of_the_test(self) -> None:
        """Whoever holds a backend keeps its connections, as in PyTorch."""
        self.join_group()
        check_held_backend(self)

    def while_a_group_is_created(self) -> None:
        """It cannot wait for peers then, and ends in gloo's own time."""
        with Woken() as woken:
            self.join_group()
            dist.barrier()  # the peer has connected
            with group_creation._creating("another"):
                dist.destroy_process_group()
        self.tell(woken.counts)

    def in_another_process(self) -> None:
        """A process that the test forks has none of the rank's threads."""
        with Woken() as woken, mock.patch.object(group_ends, "_pid", 1):
            self.join_group()
            dist.destroy_process_group()
        self.tell(woken.counts)

    def destroyed_while_a_peer_connects(self) -> None:
        self.join_group()
        for _ in range(50):
            dist.destroy_process_group(dist.new_group([0, 1]))


class EndingInFull(Ending):
    fast_exit = False


class OfThree(Ending):
    world_size = 3


class OfThreeInFull(OfThree):
    fast_exit = False


class InDetail(Ending):
    """Torch checks each collective, in a backend around gloo's."""

    def setUp(self) -> None:
        with mock.patch.dict(os.environ, TORCH_DISTRIBUTED_DEBUG="DETAIL"):
            super().setUp()


@unittest.skipUnless(system.LINUX, "threads are woken on Linux only")
class TestGroupEnds(TestCase):
    def test_nothing_is_left(self) -> None:
        self.assertEqual(outcome_of(Ending("leaves_nothing")), ("passed", ""))

    def test_threads_are_woken(self) -> None:
        """At least that thread of each group which waits for its connections."""
        for counts in ranks_told(Ending("threads_woken")):
            self.assertEqual([count > 0 for count in counts], [True] * 3)

    def test_not_if_the_class_wants_the_real_end(self) -> None:
        self.assertEqual(ranks_told(EndingInFull("threads_woken")), [[], []])

    def test_group_held_by_the_test(self) -> None:
        self.assertEqual(ranks_told(Ending("group_held_by_the_test")), [[1, 2]] * 2)

    def test_not_while_a_group_is_created(self) -> None:
        self.assertEqual(ranks_told(Ending("while_a_group_is_created")), [[], []])

    def test_not_in_another_process(self) -> None:
        self.assertEqual(ranks_told(Ending("in_another_process")), [[], []])

    def test_effects(self) -> None:
        for method in ("a_peer_waits", "work_that_is_not_done", "stores_end", "backends_of_the_test"):
            for kind in (Ending, EndingInFull):
                with self.subTest(method=method, kind=kind.__name__):
                    self.assertEqual(outcome_of(kind(method)), ("passed", ""))

    def test_one_leaves_early(self) -> None:
        for kind in (OfThree, OfThreeInFull):
            with self.subTest(kind=kind.__name__):
                self.assertEqual(outcome_of(kind("others_go_on")), ("passed", ""))

    def test_a_group_that_is_destroyed_at_once(self) -> None:
        self.assertEqual(outcome_of(Ending("destroyed_while_a_peer_connects")), ("passed", ""))

    def test_with_checks_of_torch(self) -> None:
        self.assertEqual(outcome_of(InDetail("leaves_nothing")), ("passed", ""))


@unittest.skipUnless(system.LINUX, "threads are woken on Linux only")
class TestInPersistentRanks(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def test_nothing_is_left(self) -> None:
        dist.destroy_process_group(dist.new_group([0, 1]))
        before = resources()
        with Woken() as woken:
            for _ in range(20):
                group = dist.new_group([0, 1])
                dist.all_reduce(torch.ones(1), group=group)
                dist.destroy_process_group(group)
                del group
                self.assertEqual(resources(), before)
        self.assertEqual([count > 0 for count in woken.counts], [True] * 20)


if __name__ == "__main__":
    run_tests()
