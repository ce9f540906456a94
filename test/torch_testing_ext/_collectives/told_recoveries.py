"""Programs that go on after a rank has died, begun again or got an exception, with one slip in what comes then."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from kit.early_looks import TWO_LOOKS
from kit.told import Programs, begin_last_call

from torch_testing_ext.faults import call, exits, fault_point, faults, heal, kill, mark, raises, reached, restart, stop

PROGRAMS = Programs(__name__)
KILLED = "after rank 2 was killed at all_reduce #2 by the fault: "
AGAIN = "after rank 2 was killed at 'load' #1 by the fault: "
ALONE = faults(kill(2, at=call(2)))
# From the restart on, nothing is proven, and a restarted rank may import for seconds.
BEGUN_AGAIN = faults(kill(2, at=mark("load")), restart(2), within=20)
TWICE = faults(kill(2, at=mark("load")), kill(2, at=mark("load", incarnation=1)), restart(2, times=2), within=30)
EXCEPTION = faults(raises(MemoryError("planned"), rank=1, at=call(2)))


def told(plan, *texts, **options):
    """A program that makes its groups itself. `seconds`: less than a store waits by itself."""
    return PROGRAMS.told(*texts, **{"seconds": 30.0, "joins": False, "faults": plan, **options})


def quiet(plan, **options):
    return PROGRAMS.quiet(joins=False, faults=plan, **options)


def store_of(ranks, name, size):
    return dist.FileStore(f"{ranks.file_name}.{name}", size)


def join(ranks, name, size, rank=None):
    rank = ranks.rank if rank is None else rank
    dist.init_process_group("gloo", store=store_of(ranks, name, size), rank=rank, world_size=size)


def lose_rank_2(ranks):
    """In the first world, until its calls fail. Ranks 0 and 1 leave it."""
    join(ranks, "first", 3)
    with contextlib.suppress(RuntimeError):
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def go_on(ranks):
    """The survivors have a world of their own, and have met in it."""
    lose_rank_2(ranks)
    join(ranks, "second", 2)


def begin_again(ranks):
    """All have a world, after rank 2 has died as often as it is to."""
    fault_point("load")
    join(ranks, "all", 3)


def send_to_rank_1(ranks, source):
    """Three messages, each of another length."""
    for length in range(1, 4):
        if ranks.rank == source:
            dist.send(torch.ones(length), dst=1)
        elif ranks.rank == 1:
            dist.recv(torch.ones(length), src=source)


class GroupInPython(dist.ProcessGroup):
    """A group around a backend, as managers of replicas have it."""

    def __init__(self, ranks, name, size):
        super().__init__(ranks.rank, size)
        self.backend = dist.ProcessGroupGloo(store_of(ranks, name, size), ranks.rank, size, timedelta(seconds=1000))

    def allreduce(self, tensors, options=None):
        return self.backend.allreduce(tensors)

    def broadcast(self, tensors, options=None):
        return self.backend.broadcast(tensors, dist.BroadcastOptions())


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# -- the new world of those that are left


@told(ALONE, KILLED, "rank 0 calls all_reduce", "rank 1 calls barrier in call #1 of the default group")
def a_barrier_of_one_survivor(self):
    go_on(self)
    if self.rank == 1:
        dist.barrier()  # rank 1
    dist.all_reduce(torch.ones(1))  # rank 0


@told(ALONE, KILLED, "calls all_reduce [1] float64", "in call #1 of the default group")
def another_type_of_one_survivor(self):
    go_on(self)
    total = torch.ones(1, dtype=torch.int64 if self.rank else torch.float64)
    dist.all_reduce(total)  # rank 0


@told(ALONE, KILLED, "rank 0 sends [2] float32 to rank 1, which receives [4] float32")
def a_short_message_of_a_survivor(self):
    go_on(self)
    if self.rank:
        dist.recv(torch.ones(4), src=0)  # rank 1
    else:
        dist.send(torch.ones(2), dst=1)  # rank 0
    dist.barrier()


@told(
    ALONE, KILLED, "rank 0 waits in the default group (all_reduce #3", "for rank 1, which waits in a store (get('more'"
)
def a_survivor_with_one_step_less(self):
    go_on(self)
    store = store_of(self, "keys", 2)
    for _ in range(2 if self.rank else 3):
        dist.all_reduce(torch.ones(1))  # rank 0
    store.get("more")  # rank 1


@told(ALONE, KILLED, "rank 0 waits in group one", "for rank 1")
def crossed_groups_of_survivors(self):
    go_on(self)
    one, other = dist.new_group([0, 1], group_desc="one"), dist.new_group([0, 1], group_desc="other")
    for group in (other, one) if self.rank else (one, other):
        dist.all_reduce(torch.ones(1), group=group)  # rank 0


@told(ALONE, KILLED, "rank 0 waits in group one", "for rank 1")
def crossed_groups_in_a_thread(self):
    go_on(self)
    one, other = dist.new_group([0, 1], group_desc="one"), dist.new_group([0, 1], group_desc="other")

    def work():
        for group in (other, one) if self.rank else (one, other):
            dist.all_reduce(torch.ones(1), group=group)  # rank 0

    in_thread(work)


@told(ALONE, KILLED, "rank 0 left before all_reduce #2", "rank 1 is waiting in it")
def a_survivor_that_leaves_early(self):
    go_on(self)
    dist.all_reduce(torch.ones(1))
    if self.rank:
        dist.all_reduce(torch.ones(1))  # rank 1


@told(ALONE, KILLED, "rank 1 lost rank 0")
def a_survivor_that_does_not_wait(self):
    go_on(self)
    # So large that rank 1 does not have it before rank 0 has left.
    total = torch.ones(1 << 24)
    dist.barrier()
    dist.all_reduce(total, async_op=self.rank == 0)  # rank 1


@told(ALONE, KILLED, "rank 1 of 3 raised Dist")
def a_store_of_the_dead(self):
    files = store_of(self, "port", 3)
    if self.rank == 2:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        files.set("port", str(store.port))
    else:
        store = dist.TCPStore("localhost", int(files.get("port")), is_master=False, wait_for_workers=False)
    go_on(self)
    dist.all_reduce(torch.ones(1))
    if self.rank:
        store.get("more")  # rank 1


# -- the way there


@told(ALONE, KILLED, "ranks 0, 1 wait for rank 2 of 3 in init_process_group (line ")
def the_size_of_before(self):
    lose_rank_2(self)
    dist.init_process_group("gloo", store=store_of(self, "second", 3), rank=self.rank, world_size=3)  # ranks 0, 1


@told(ALONE, KILLED, "rank 0 waits for rank 1 of 2 in init_process_group at ", "rank 1 waits for rank 0 of 2")
def names_that_part(self):
    lose_rank_2(self)
    name = f"world {1 + self.rank}"
    dist.init_process_group("gloo", store=store_of(self, name, 2), rank=self.rank, world_size=2)


@told(ALONE, KILLED, "where ranks 0, 1 are all rank 0")
def two_first_ranks(self):
    lose_rank_2(self)
    join(self, "second", 2, rank=0)


@told(ALONE, "rank 2 was killed", "by the fault without setting the key 'of rank 2' of a store; ranks 0, 1")
def a_key_of_the_dead(self):
    lose_rank_2(self)
    store = store_of(self, "keys", 3)
    store.wait(["of rank 2"])  # ranks 0, 1


@told(ALONE, KILLED, "ranks 1, 2 left without setting the key 'ready' of a store; rank 0 is waiting")
def a_key_of_a_survivor_that_gives_up(self):
    lose_rank_2(self)
    store = store_of(self, "keys", 3)
    if self.rank == 0:
        store.get("ready")  # rank 0


# -- a rank that begins again


@told(
    BEGUN_AGAIN, AGAIN, "rank 2 calls barrier", "call all_reduce", "in call #1 of the default group", needs_timeout=True
)
def a_barrier_of_the_second_process(self):
    begin_again(self)
    begin_last_call(self)
    if self.incarnation:
        dist.barrier()  # rank 2
    dist.all_reduce(torch.ones(1))  # ranks 0, 1


@told(
    TWICE,
    "after rank 2 was killed at 'load' #1 by the fault",
    "rank 2 calls broadcast",
    "call all_reduce",
    needs_timeout=True,
)
def a_broadcast_of_the_third_process(self):
    begin_again(self)
    begin_last_call(self)
    if self.incarnation == 2:
        dist.broadcast(torch.ones(1), 0)  # rank 2
    else:
        dist.all_reduce(torch.ones(1))  # ranks 0, 1


@told(BEGUN_AGAIN, AGAIN, "rank 2 left before all_reduce #3", "ranks 0, 1 are waiting in it")
def a_second_process_that_counts_from_its_checkpoint(self):
    begin_again(self)
    for _ in range(2 if self.incarnation else 3):
        dist.all_reduce(torch.ones(1))  # ranks 0, 1


@told(BEGUN_AGAIN, AGAIN, "rank 2 waits for ranks 0, 1 of 3 in init_process_group", needs_timeout=True)
def a_second_process_in_another_world(self):
    fault_point("load")
    begin_last_call(self)
    join(self, f"world {self.incarnation}", 3)


# -- exceptions


@told(EXCEPTION, "after rank 1 raised MemoryError at all_reduce #2 by the fault: ", "rank 1 calls barrier")
def a_handler_that_goes_on_alone(self):
    join(self, "world", 3)
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(1))  # ranks 0, 2
        except MemoryError:
            dist.barrier()  # rank 1


@told(EXCEPTION, "rank 1 of 3 did not catch MemoryError, which the fault raised at all_reduce #2")
def a_handler_of_another_exception(self):
    join(self, "world", 3)
    with contextlib.suppress(RuntimeError):
        for _ in range(2):
            dist.all_reduce(torch.ones(1))  # rank 1


@told(
    faults(raises(OSError("disk"), rank=1, at=mark("save"))),
    "rank 1 of 3 did not catch OSError, which the fault raised at 'save' #1",
)
def a_thread_that_nobody_asks(self):
    in_thread(lambda: fault_point("save"))  # rank 1


@told(faults(kill(2, at=mark("go")), must_reach=["here"]), "no rank has reached 'here' after the fault")
def a_name_of_before(self):
    join(self, "world", 3)
    reached("here")
    dist.barrier()
    fault_point("go")


# -- sound


@quiet(ALONE)
def messages_of_survivors_that_were_lost_before(self):
    join(self, "first", 3)
    with contextlib.suppress(RuntimeError):
        send_to_rank_1(self, 2)
    dist.destroy_process_group()
    join(self, "second", 2)
    send_to_rank_1(self, 0)
    dist.barrier()


@quiet(ALONE)
def survivors_go_on(self):
    go_on(self)
    for _ in range(3):
        dist.all_reduce(torch.ones(1))


@quiet(ALONE)
def a_survivor_that_comes_late(self):
    lose_rank_2(self)
    if self.rank == 1:
        time.sleep(TWO_LOOKS)
    join(self, "second", 2)
    dist.all_reduce(torch.ones(1))


@quiet(ALONE)
def a_wait_for_the_dead_with_an_end(self):
    lose_rank_2(self)
    with self.assertRaises(RuntimeError):
        store_of(self, "keys", 3).wait(["of rank 2"], timedelta(seconds=TWO_LOOKS))
    join(self, "second", 2)
    dist.barrier()


@quiet(BEGUN_AGAIN)
def all_meet_again(self):
    begin_again(self)
    dist.all_reduce(torch.ones(1))
    dist.barrier()


@quiet(TWICE)
def a_third_process_catches_up(self):
    begin_again(self)
    for _ in range(3):
        dist.all_reduce(torch.ones(1))


@quiet(faults(kill(2, at=call(2)), restart(2)))
def the_old_world_parts_and_the_new_agrees(self):
    """After the loss, ranks 0 and 1 call what they like in the world that is lost."""
    if not self.incarnation:
        join(self, "first", 3)
        for dtype in (torch.float32, torch.float32, torch.int64 if self.rank else torch.float64):
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(torch.ones(1, dtype=dtype))
        dist.destroy_process_group()
    join(self, "second", 3)
    dist.all_reduce(torch.ones(1))


@quiet(EXCEPTION)
def a_call_that_is_made_again(self):
    join(self, "world", 3)
    for _ in range(3):
        try:
            dist.all_reduce(torch.ones(1))
        except MemoryError:
            dist.all_reduce(torch.ones(1))


@quiet(faults(raises(OSError("disk"), rank=1, at=mark("save")), must_reach=["saved"]))
def a_thread_that_saves_again(self):
    def save():
        try:
            fault_point("save")
        except OSError:
            fault_point("save")
        reached("saved")

    in_thread(save)


@quiet(faults(kill(2, at=call(2)), must_reach=["alone"]))
def threads_that_lose_a_peer(self):
    join(self, "first", 3)
    lost = []

    def work():
        try:
            for _ in range(3):
                dist.all_reduce(torch.ones(1))
        except RuntimeError:
            lost.append(True)

    in_thread(work)
    self.assertTrue(lost)
    dist.destroy_process_group()
    join(self, "second", 2)
    in_thread(lambda: dist.all_reduce(torch.ones(1)))
    reached("alone")


@quiet(faults(kill(2, at=call(2, "all_reduce")), must_reach=["healed"]))
def a_manager_with_groups_in_python(self):
    group = GroupInPython(self, "first", 3)
    lost = False
    with contextlib.suppress(RuntimeError):
        for _ in range(3):
            lost = True
            group.allreduce([torch.ones(2)]).wait()
            lost = False
    self.assertTrue(lost)
    # The other survivor waits as long as a connection is open.
    del group
    group = GroupInPython(self, "second", 2)
    total = torch.ones(2)
    group.allreduce([total]).wait()
    self.assertEqual(total.tolist(), [2.0, 2.0])
    reached("healed")


@quiet(faults(kill(2, at=call(2, "all_reduce")), must_reach=["healed"]))
def a_backend_beside_the_default_group(self):
    join(self, "world", 3)
    backend = GroupInPython(self, "own", 3).backend
    backend.allreduce([torch.ones(2)]).wait()
    with self.assertRaises(RuntimeError):
        backend.allreduce([torch.ones(2)]).wait()
    del backend
    backend = GroupInPython(self, "of survivors", 2).backend
    backend.allreduce([torch.ones(2)]).wait()
    reached("healed")


@quiet(faults(stop(rank=2, at=mark("there"))))
def a_rank_that_is_healed(self):
    join(self, "world", 3)
    fault_point("there")
    if self.rank == 0:
        time.sleep(TWO_LOOKS)
        heal(2)
    dist.all_reduce(torch.ones(1))


@quiet(faults(exits(0, 2, at=call(2)), must_reach=["alone"]))
def a_rank_that_exits_in_order(self):
    go_on(self)
    dist.barrier()
    reached("alone")


@quiet(faults(kill(2, at=call(2)), kill(3, at=call(2))), size=4)
def two_of_four(self):
    join(self, "first", 4)
    dist.all_reduce(torch.ones(1))
    with self.assertRaises(RuntimeError):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    join(self, "second", 2)
    dist.all_reduce(torch.ones(1))
