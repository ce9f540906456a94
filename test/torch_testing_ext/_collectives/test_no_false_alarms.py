"""Programs whose ranks wait long, or issue collectives that differ rightly: nothing is found, and the tests pass.

Each wait lasts until the parent has looked at the ranks several times, so that a false alarm would have come.
"""

import contextlib
import io
import os
import queue
import signal
import threading
import time
import unittest
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from kit import ranks
from kit.outcomes import outcome_of

from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext.common_distributed import collectives_may_differ
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import probes
from torch_testing_ext.launch.watching import looks

LOOKS = 3
# Seconds without news until the parent looks. The next looks follow in times that grow from there.
FIRST_LOOK = 0.3


def beat_and_set(event):
    for _ in range(30):
        time.sleep(0.1)
    event.set()


class Ranks(ranks.Ranks):
    world_size = 3

    def looks(self):
        """Wait until the parent has probed this rank a few times. Sleeps in between: no thread must be needed."""
        file = Path(self.file_name).with_name(f"rank{self.rank}.recorder")
        seen = set()
        while len(seen) < LOOKS:
            if file.exists():
                seen.add(file.stat().st_mtime_ns)
            time.sleep(0.02)

    # -- slow peers

    def a_sleeping_rank(self):
        self.join_group()
        if self.rank == 0:
            self.looks()
        dist.all_reduce(torch.ones(3))

    def a_sleeping_rank_in_a_chain(self):
        """Rank 0 waits for rank 1, which waits for rank 2 in another group, which sleeps."""
        self.join_group()
        first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
        if self.rank == 2:
            self.looks()
        if self.rank in (1, 2):
            dist.all_reduce(torch.ones(3), group=second)
        if self.rank in (0, 1):
            dist.all_reduce(torch.ones(3), group=first)

    def a_busy_rank(self):
        self.join_group()
        if self.rank == 0:
            deadline = time.process_time() + 2
            while time.process_time() < deadline:
                sum(range(1000))
        dist.all_reduce(torch.ones(3))

    def a_rank_that_was_stopped(self):
        """As by a debugger: it does not answer."""
        self.join_group()
        pids = Path(self.file_name).with_name("pid")
        if self.rank == 0:
            pids.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.rank == 1:
            self.looks()
            os.kill(int(pids.read_text()), signal.SIGCONT)
        dist.all_reduce(torch.ones(3))

    def a_wait_at_the_store(self):
        self.join_group()
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=2000))
        if self.rank == 0:
            thread = threading.Thread(target=lambda: (self.looks(), store.set("go", "now")))
            thread.start()
            thread.join()
        else:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            store.get("go")
        if self.rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()

    def waits_at_stores_until_their_timeouts(self):
        """A time-out of the call, and one of another store."""
        self.join_group()
        store, other = dist.distributed_c10d._get_default_store(), dist.FileStore(f"{self.file_name}.other", 3)
        store.set_timeout(timedelta(seconds=2000))
        other.set_timeout(timedelta(seconds=2))
        if self.rank == 0:
            with self.assertRaisesRegex(RuntimeError, "(?i)time"):
                store.wait(["never"], timedelta(seconds=2))
            with self.assertRaisesRegex(RuntimeError, "(?i)time"):
                other.get("never")
        dist.all_reduce(torch.ones(3))

    # -- waits for something of the own process, which end

    def _in_own_process(self, until_the_end):
        """Rank 1 waits, and the others wait for it."""
        self.join_group()
        if self.rank == 1:
            until_the_end()
        dist.all_reduce(torch.ones(3))

    def a_lock_that_a_thread_opens(self):
        def opened():
            lock = threading.Lock()
            lock.acquire()
            threading.Thread(target=lambda: (self.looks(), lock.release())).start()
            lock.acquire()

        self._in_own_process(opened)

    def an_event_with_a_timeout(self):
        self._in_own_process(lambda: threading.Event().wait(3.0))

    def a_queue_that_a_signal_fills(self):
        def filled():
            filled = queue.SimpleQueue()
            signal.signal(signal.SIGALRM, lambda *_: filled.put(None))
            signal.setitimer(signal.ITIMER_REAL, 3.0)
            filled.get()

        self._in_own_process(filled)

    def a_queue_that_another_rank_fills(self):
        """By a signal."""
        self.join_group()
        store = dist.distributed_c10d._get_default_store()
        if self.rank == 1:
            filled = queue.SimpleQueue()
            signal.signal(signal.SIGUSR1, lambda *_: filled.put(None))
            store.set("pid", str(os.getpid()))
            filled.get()
        elif self.rank == 2:
            pid = int(store.get("pid"))
            self.looks()
            os.kill(pid, signal.SIGUSR1)
        dist.all_reduce(torch.ones(3))

    def an_event_that_a_callback_sets(self):
        self.join_group()
        mine, is_over = torch.ones(3), threading.Event()
        if self.rank == 2:
            self.looks()
        work = dist.all_reduce(mine, async_op=True)
        if self.rank == 1:
            work.get_future().add_done_callback(lambda _: is_over.set())
            is_over.wait()
        work.wait()

    def a_pipe_that_a_child_fills(self):
        def filled():
            reads, writes = os.pipe()
            if os.fork() == 0:
                self.looks()
                os.write(writes, b".")
                os._exit(0)
            os.read(reads, 1)

        self._in_own_process(filled)

    # -- waits that look like a cycle of two groups, but end

    def _crossed(self, between):
        """Ranks 0 and 1 issue a collective each that the other issues only after `between`."""
        self.join_group()
        groups = dist.new_group([0, 1]), dist.new_group([0, 1])
        if self.rank == 2:
            return
        mine, other = (0, 1) if self.rank == 0 else (1, 0)
        work = dist.all_reduce(torch.ones(3), group=groups[mine], async_op=True)
        between()
        dist.all_reduce(torch.ones(3), group=groups[other])
        work.wait()

    def crossed_and_asleep(self):
        self._crossed(self.looks)

    def crossed_and_at_a_lock(self):
        """Another thread opens it."""

        def between():
            lock = threading.Lock()
            lock.acquire()
            thread = threading.Thread(target=lambda: (self.looks(), lock.release()))
            thread.start()
            lock.acquire()
            thread.join()

        self._crossed(between)

    def crossed_and_at_a_lock_with_a_timeout(self):
        def between():
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=3.0)

        self._crossed(between)

    def crossed_and_woken_by_a_signal(self):
        def between():
            lock = threading.Lock()
            lock.acquire()
            signal.signal(signal.SIGALRM, lambda *_: lock.release())
            signal.setitimer(signal.ITIMER_REAL, 3.0)
            lock.acquire()

        self._crossed(between)

    def crossed_and_receiving(self):
        def between():
            if self.rank == 0:
                dist.recv(torch.empty(1), 1)
            else:
                self.looks()
                dist.send(torch.ones(1), 0)

        self._crossed(between)

    def crossed_with_a_thread_that_receives(self):
        """The main threads wait for collectives, other threads for messages."""
        self.join_group()
        groups = dist.new_group([0, 1]), dist.new_group([0, 1])
        if self.rank == 2:
            return
        mine, other = (0, 1) if self.rank == 0 else (1, 0)
        if self.rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.empty(1), 0)

        def later():
            if self.rank == 0:
                dist.recv(torch.empty(1), 1)
            else:
                self.looks()
                dist.send(torch.ones(1), 0)
            dist.all_reduce(torch.ones(3), group=groups[other])

        thread = threading.Thread(target=later)
        thread.start()
        dist.all_reduce(torch.ones(3), group=groups[mine])
        thread.join()

    # -- messages

    def messages_of_a_sleeping_rank(self):
        """Ranks wait for each other in a chain, and hold works that nobody waits for."""
        self.join_group()
        kept = dist.isend(torch.ones(1), (self.rank + 1) % 3, tag=7)
        before, after = (self.rank - 1) % 3, (self.rank + 1) % 3
        if self.rank == 0:
            self.looks()
            dist.send(torch.ones(1), after)
            dist.recv(torch.empty(1), before)
        else:
            dist.irecv(torch.empty(1), before).wait()
            dist.send(torch.ones(1), after)
        dist.recv(torch.empty(1), before, tag=7)
        kept.wait()

    def messages_in_a_compiled_function(self):
        """The compiler leaves the methods of groups alone: this imports it."""

        @torch.compile(backend="eager")
        def exchange(x):
            dist.send(x, 1) if self.rank == 0 else dist.recv(x, 0)
            return x * 2

        self.join_group()
        if self.rank != 2:
            self.assertEqual(exchange(torch.full((3,), self.rank + 1.0)), torch.full((3,), 2.0))

    def a_message_of_another_thread(self):
        """The main threads of two ranks receive from each other."""
        self.join_group()
        if self.rank == 2:
            return
        thread = threading.Thread(target=lambda: (self.looks(), dist.send(torch.ones(1), 1 - self.rank)))
        thread.start()
        dist.recv(torch.empty(1), 1 - self.rank)
        thread.join()

    def a_message_that_is_not_noted(self):
        """Backends send it; the receiver waits for rank 1, which waits for it."""
        self.join_group()
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        if self.rank == 0:
            dist.recv(torch.empty(1), 1)
            dist.recv(torch.empty(1), 2)
            dist.all_reduce(torch.ones(1))
        else:
            backend.send([torch.ones(1)], 0, 0).wait() if self.rank == 1 else None
            if self.rank == 2:
                self.looks()
                backend.send([torch.ones(1)], 0, 0).wait()
            dist.all_reduce(torch.ones(1))

    def crossed_while_a_message_is_awaited(self):
        """A work of a message, and one of a collective, under the same name."""
        self.join_group()
        groups = dist.new_group([0, 1]), dist.new_group([0, 1])
        if self.rank == 2:
            self.looks()
            dist.send(torch.ones(1), 0)
            return
        mine, other = (0, 1) if self.rank == 0 else (1, 0)
        first = dist.all_reduce(torch.ones(3), group=groups[mine], async_op=True)
        work = dist.irecv(torch.empty(1), 2) if self.rank == 0 else first
        if self.rank == 0:
            work.wait()
            second = dist.all_reduce(torch.ones(3), group=groups[other], async_op=True)
        else:
            second = dist.all_reduce(torch.ones(3), group=groups[other], async_op=True)
            work.wait()
        for work in (first, second):
            work.wait()

    def crossed_with_a_thread_that_goes_on(self):
        """The main thread waits in a collective; another thread issues the missing one."""
        self.join_group()
        groups = dist.new_group([0, 1]), dist.new_group([0, 1])
        if self.rank == 2:
            return
        mine, other = (0, 1) if self.rank == 0 else (1, 0)

        def later():
            self.looks()
            dist.all_reduce(torch.ones(3), group=groups[other])

        thread = threading.Thread(target=later)
        thread.start()
        dist.all_reduce(torch.ones(3), group=groups[mine])
        thread.join()

    def crossed_with_a_thread_that_another_wakes(self):
        """A thread that cannot issue collectives wakes one that does."""
        self.join_group()
        groups = dist.new_group([0, 1]), dist.new_group([0, 1])
        if self.rank == 2:
            return
        mine, other = (0, 1) if self.rank == 0 else (1, 0)
        go = threading.Event()

        def later():
            go.wait()
            dist.all_reduce(torch.ones(3), group=groups[other])

        threads = [threading.Thread(target=later), threading.Thread(target=beat_and_set, args=(go,))]
        for thread in threads:
            thread.start()
        dist.all_reduce(torch.ones(3), group=groups[mine])
        for thread in threads:
            thread.join()

    def crossed_until_the_timeout_of_the_groups(self):
        self.join_group()
        groups = [dist.new_group([0, 1], timeout=timedelta(seconds=4)) for _ in range(2)]
        if self.rank == 2:
            return
        with self.assertRaisesRegex(RuntimeError, "(?i)time|clos|reset"):
            dist.all_reduce(torch.ones(3), group=groups[self.rank])

    # -- collectives that may differ

    def shapes_of_equal_size(self):
        self.join_group()
        dist.all_reduce(torch.ones(2, 2) if self.rank else torch.ones(4))

    def splits(self):
        self.join_group()
        # Rank r sends r + 1 elements to each.
        mine = torch.full((self.world_size * (self.rank + 1),), float(self.rank))
        outputs = [each + 1 for each in range(self.world_size)]
        dist.all_to_all_single(torch.empty(sum(outputs)), mine, outputs, [self.rank + 1] * self.world_size)

    def sends_between_collectives(self):
        self.join_group()
        if self.rank == 0:
            dist.send(torch.ones(4), 1)
        elif self.rank == 1:
            dist.recv(torch.empty(4), 0)
        dist.all_reduce(torch.ones(4))
        dist.barrier()

    def two_worlds(self):
        """Ranks 0 and 1 form one world, rank 2 another, both with groups of the same names."""
        size = 1 if self.rank == 2 else 2
        store = dist.FileStore(f"{self.file_name}{size}", size)
        dist.init_process_group("gloo", store=store, rank=self.rank % 2, world_size=size)
        dist.all_reduce(torch.ones(size))

    def one_world_after_another(self):
        for count in (1, 2):
            store = dist.FileStore(f"{self.file_name}{count}", self.world_size)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
            dist.all_reduce(torch.ones(count))
            dist.destroy_process_group()

    def subgroups(self):
        self.join_group()
        group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
        dist.all_reduce(torch.ones(3 if self.rank == 1 else 4), group=group)

    def more_than_the_recorder_keeps(self):
        self.join_group()
        for _ in range(2100):
            dist.all_reduce(torch.ones(1))

    def an_error_of_a_wait_that_is_expected(self):
        self.join_group()
        store = dist.distributed_c10d._get_default_store()
        if self.rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            with self.assertRaisesRegex(RuntimeError, "Operation timed out"):
                work.wait(timedelta(seconds=0.2))
            store.set("over", "")
        else:
            store.get("over")

    def an_error_that_is_expected(self):
        """Collectives that do not match, which the groups' time-out ends, and a test that expects that."""
        self.join_group(timeout=timedelta(seconds=3))
        with self.assertRaises(RuntimeError):
            if self.rank == 1:
                dist.barrier()
            else:
                dist.all_reduce(torch.ones(4))

    def groups_that_nobody_noted(self):
        """Groups made without `torch.distributed`, of which only rank 0 uses one, have no name."""
        self.join_group()
        if self.rank == 0:
            alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
            alone.allreduce([torch.ones(7)]).wait()
        dist.all_reduce(torch.ones(4))

    def patched_modules(self):
        """What a test leaves replaced does not disturb the record."""
        self.join_group()
        dist.all_reduce(torch.ones(4))
        if self.rank == 0:
            broken = mock.Mock(side_effect=AssertionError("must not be called"))
            of_time = ("time.time_ns", "time.time", "time.monotonic", "time.sleep")
            of_os = ("os.listdir", "os.open", "os.close", "os.pwrite", "os.getpid", "os.stat")
            for target in (*of_time, *of_os, "builtins.open", "pickle.dumps", "gc.collect", "linecache.getline"):
                mock.patch(target, broken).start()

    @collectives_may_differ("tests the decorator")
    def on_purpose(self):
        self.join_group()
        dist.all_reduce(torch.ones(4, dtype=torch.int32 if self.rank == 1 else torch.float32))


def shrink(test, gone):
    """In a rank: have the group of all go on without one rank."""
    store = dist.FileStore(test.file_name, 3)
    dist.init_process_group("gloo", store=store, rank=test.rank, world_size=3, enable_reconfigure=True)
    for number, members in enumerate(([0, 1, 2], [rank for rank in range(3) if rank != gone])):
        store.set(f"{number} {test.rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"{number} {rank}").decode() for rank in members]
        if test.rank in members:
            dist._reconfigure(number, handles, timeout=timedelta(seconds=60)).wait()
            dist.all_reduce(torch.ones(1))
            dist.barrier()


@unittest.skipUnless(hasattr(dist, "_reconfigure"), "this torch has no _reconfigure")
class ReconfiguredGroupTest(unittest.TestCase):
    """A rank that is no member any more has missed nothing; the others are still compared."""

    class Shrinking(ranks.Ranks):
        world_size = 3

        def without_the_first(self):
            shrink(self, 0)

        def without_the_last(self):
            shrink(self, 2)

        def members_disagree(self):
            shrink(self, 0)
            if self.rank == 1:
                dist.all_reduce(torch.ones(1))
            elif self.rank == 2:
                dist.broadcast(torch.ones(1), 0)

    def test_without_and_with_a_log(self):
        for kinds in ("", "calls"):
            with self.subTest(kinds=kinds), mock.patch.dict(os.environ, TORCH_TESTING_EXT_SANITIZE=kinds):
                for name in ("without_the_first", "without_the_last"):
                    said = io.StringIO()
                    with contextlib.redirect_stderr(said):
                        self.assertEqual(outcome_of(self.Shrinking(name)), ("passed", ""))
                    self.assertNotIn("torch_testing_ext: ", said.getvalue())
                seen = outcome_of(self.Shrinking("members_disagree"))
                self.assertRegex(seen.message, "rank 1 calls all_reduce .*, rank 2 calls broadcast .* in call #3 ")


# What is said of a test that passes: by its name.
REMARKS = {
    "more_than_the_recorder_keeps": "were not compared: ",
    # Whether the test expects the error of a wait is not guessed from its source: the others have left, which is said.
    "an_error_of_a_wait_that_is_expected": "ranks 1, 2 left before all_reduce #1, which rank 0 issued",
}


class NoFalseAlarmTest(unittest.TestCase):
    def check(self, name):
        result, said = unittest.TestResult(), io.StringIO()
        # Below the time-out of gloo's groups: a wait in them counts as endless.
        with (
            mock.patch.object(ranked_test_case, "TIMEOUT_DEFAULT", 1000.0),
            mock.patch.object(probes, "FIRST_PROBE", FIRST_LOOK),
            mock.patch.object(looks, "FIRST_LOOK", FIRST_LOOK / 2),
            contextlib.redirect_stderr(said),
        ):
            Ranks(name).run(result)
        self.assertEqual([text for _, text in result.errors + result.failures], [])
        self.assertEqual(result.skipped, [])
        remark = REMARKS.get(name, r"\A(?!.*torch_testing_ext: )")
        self.assertRegex(said.getvalue(), f"(?s){remark}")


for _name, _body in vars(Ranks).items():
    if callable(_body) and not _name.startswith("_") and _name not in ("setUp", "join", "looks", "world_size"):
        setattr(NoFalseAlarmTest, f"test_{_name}", lambda self, name=_name: self.check(name))


if __name__ == "__main__":
    run_tests()
