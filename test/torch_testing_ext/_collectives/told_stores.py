"""Programs whose ranks wait for each other before they have a group: in `init_process_group`, or at a store."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from kit.early_looks import TWO_LOOKS
from kit.told import Programs

PROGRAMS = Programs(__name__)


def told(*texts, **options):
    """A program whose file stores wait as long as a test may. A store's own time-out of 5 minutes is too short here."""
    return PROGRAMS.told(*texts, **{"seconds": 30.0, "joins": False, **options})


def quiet(**options):
    return PROGRAMS.quiet(joins=False, **options)


def join(ranks, rank, size, name="world"):
    store = dist.FileStore(f"{ranks.file_name}.{name}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


# -- a new world


@told("rank 0 waits for rank 1 of 2 in init_process_group (line ", "as which nobody joins")
def only_rank_0(self):
    if self.rank == 0:
        store = dist.FileStore(f"{self.file_name}.world", 2)
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)  # rank 0


@told("ranks 0, 1 wait for rank 2 of 3 in init_process_group (line ", "as which nobody joins")
def the_size_before_the_loss(self):
    if self.rank < 2:
        join(self, self.rank, 3)


@told("rank 0 waits for ranks 1, 2 of 3 in init_process_group at ", "ranks 1, 2 wait for rank 0 of 3")
def names_that_part(self):
    name = "a" if self.rank == 0 else "b"
    store = dist.FileStore(f"{self.file_name}.{name}", 3)
    dist.init_process_group("gloo", store=store, rank=self.rank, world_size=3)


@told("for rank 1 of 2 in init_process_group, where ranks 0, 1 are all rank 0", "as which nobody joins")
def two_first_ranks(self):
    if self.rank < 2:
        join(self, 0, 2)


@told("ranks 0, 1 wait for rank 2 of 3 in init_process_group (line ", joins=True)
def a_second_world_that_one_leaves_out(self):
    dist.barrier()
    dist.destroy_process_group()
    if self.rank < 2:
        join(self, self.rank, 3)


@told("rank 0 left without setting the key 'go' of a store; rank 2 is waiting for it")
def one_waits_for_a_key_meanwhile(self):
    store = dist.FileStore(f"{self.file_name}.keys", 3)
    if self.rank == 1:
        join(self, 1, 2)
    if self.rank == 2:
        store.wait(["go"])  # rank 2


@told("ranks 0, 1 wait for rank 2 of 3 in init_process_group (line ", joins=True)
def a_world_in_the_same_store_again(self):
    dist.barrier()
    dist.destroy_process_group()
    for time_of_world in range(2):
        if self.rank == 2 and time_of_world == 1:
            return
        join(self, self.rank, 3, f"world {time_of_world}")
        dist.barrier()
        dist.destroy_process_group()


def free_port():
    """A port that nobody listens at, the same in all ranks."""
    port = [None]
    if dist.get_rank() == 0:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port[0] = one.getsockname()[1]
    dist.broadcast_object_list(port, 0)
    dist.barrier()
    dist.destroy_process_group()
    return port[0]


def join_by_environment(rank, size, port):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    with mock.patch.dict(os.environ, place):
        dist.init_process_group("gloo")


@told("ranks 0, 1 wait for rank 2 of 3 in init_process_group (line ", joins=True)
def an_environment_of_the_size_before(self):
    """Rank 0 waits for the workers of its server, and rank 1 for their addresses."""
    port = free_port()
    if self.rank < 2:
        join_by_environment(self.rank, 3, port)


@told("ranks 1, 2 wait for rank 0 of 3 in init_process_group (line ", joins=True)
def a_server_that_nobody_starts(self):
    port = free_port()
    if self.rank:
        join_by_environment(self.rank, 3, port)


@told("ranks 0, 1 wait for rank 2 of 3", "rank 2 waits for ranks 0, 1 of 3 in init_process_group at ", joins=True)
def ports_that_part(self):
    """Nobody listens at that of rank 2."""
    port = free_port()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        join_by_environment(self.rank, 3, one.getsockname()[1] if self.rank == 2 else port)


# -- keys before there is a group


@told("ranks 1, 2 left without setting the key 'b' of a store; rank 0 is waiting for it")
def a_key_of_a_file(self):
    store = dist.FileStore(f"{self.file_name}.keys", 3)
    if self.rank == 0:
        store.get("b")  # rank 0


@told("ranks 1, 2 left without setting the key 'b' of a store; rank 0 is waiting for it")
def the_second_key_of_a_file(self):
    store = dist.FileStore(f"{self.file_name}.keys", 3)
    if self.rank == 1:
        store.set("a", "")
    if self.rank == 0:
        store.wait(["a", "b"])  # rank 0


@told("without setting the keys 'k/1', 'k/3' of a store; rank 0 is waiting for them")
def keys_behind_a_prefix(self):
    store = dist.PrefixStore("members", dist.FileStore(f"{self.file_name}.keys", 3))
    if self.rank == 2:
        store.set("k/2", "")
    if self.rank == 0:
        keys = [f"k/{place}" for place in range(1, 4)]
        store.wait(keys)  # rank 0


@told("ranks 0, 1 wait for the key 'quorum' of a store (line ", "which nobody sets", size=2)
def each_waits_for_the_other(self):
    store = dist.FileStore(f"{self.file_name}.keys", 2)
    store.get("quorum")  # ranks 0, 1
    store.set("quorum", str(self.rank))


@told("ranks 0, 1 wait for the key 'b' of a store (line ", "which nobody sets", size=2, joins=True)
def a_key_of_a_server_behind_a_prefix(self):
    """The thread that waits keeps its connection for itself."""
    server = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=2000))
    store = dist.PrefixStore("of this rank", server)
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=2000))
    store.set("a", "")
    store.wait(["a", "b"])  # ranks 0, 1


# -- sound


@quiet(size=2)
def a_late_rank(self):
    if self.rank == 1:
        time.sleep(TWO_LOOKS)
    join(self, self.rank, 2)
    dist.all_reduce(torch.ones(1))


@quiet(size=2)
def a_late_key(self):
    store = dist.FileStore(f"{self.file_name}.keys", 2)
    if self.rank == 1:
        time.sleep(TWO_LOOKS)
        store.set("a", "")
        store.set("b", "")
    store.wait(["a", "b"])


@quiet(size=3)
def two_worlds_at_one_file(self):
    """Prefixes part them, and each has a rank 0; rank 2 is alone."""
    file = dist.FileStore(f"{self.file_name}.worlds", 3)
    place, size, prefix = (0, 1, "b") if self.rank == 2 else (self.rank, 2, "a")
    if self.rank == 1:
        time.sleep(TWO_LOOKS)
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, file), rank=place, world_size=size)
    dist.barrier()


@quiet(size=2)
def a_wait_that_a_test_expects(self):
    store = dist.FileStore(f"{self.file_name}.keys", 2)
    with self.assertRaises(RuntimeError):
        store.wait(["never"], timedelta(seconds=TWO_LOOKS))


@quiet(size=2)
def a_server_that_comes_late(self):
    dist.init_process_group("gloo", store=dist.FileStore(f"{self.file_name}.first", 2), rank=self.rank, world_size=2)
    port = free_port()
    if self.rank == 0:
        time.sleep(TWO_LOOKS)
    join_by_environment(self.rank, 2, port)
    dist.barrier()
