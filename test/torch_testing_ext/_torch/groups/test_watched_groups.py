"""Each group is noted as it is made, with its members, store, backend and time-out."""

import contextlib
import os
import socket
import sys
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from kit.own_process import error_of, in_own_process
from kit.plain_groups import world_of_one

from torch_testing_ext._torch.groups import group_creators, made_groups, watched_groups


def watch(creating=lambda name: contextlib.nullcontext()):
    watched_groups.watch_process_groups(creating, lambda error: False)


@in_own_process
def test_groups():
    seen = []

    @contextlib.contextmanager
    def creating(name):
        seen.append((name, made_groups.group_in_creation()))
        yield
        seen.append(made_groups.count_of_groups())

    watch(creating)
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=40)
    dist.init_process_group("gloo", store=server, rank=0, world_size=1, timeout=limit)
    group = dist.new_group([0], timeout=timedelta(seconds=20), group_desc="mine")
    world, new = made_groups.made_groups()
    assert (world.name, world.description, world.members, world.index) == ("0", "default_pg", (0,), 0)
    assert (world.world, world.backend, world.timeout) == (str(server.port), "cpu:gloo", 40) or world.backend == "gloo"
    assert (new.description, new.members, new.world, new.timeout) == ("mine", (0,), str(server.port), 20)
    assert made_groups.number_of_group(group) == 1 and world.made_at <= new.made_at
    # A context is entered before the group is, and left before it is noted.
    assert seen == [("0", None), 0, (new.name, None), 1]


@in_own_process
def test_groups_in_creation():
    """A group is known while it is made, and no longer if that fails."""
    seen = []

    def take_part(arguments, create):
        group = made_groups.group_in_creation()
        seen.append((group.name, group.members, group.timeout))
        if len(seen) == 2:
            raise OSError
        return create()

    group_creators.take_part(take_part)
    watch()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=40))
    assert made_groups.group_in_creation() is None
    assert isinstance(error_of(lambda: dist.new_group([0], timeout=timedelta(seconds=20))), OSError)
    assert made_groups.group_in_creation() is None
    assert [one[1:] for one in seen] == [((0,), 40), ((0,), 20)]


@in_own_process
def test_lists_of_members():
    """Also of a group that this process does not belong to."""
    watch()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    line = sys._getframe().f_lineno + 1
    dist.new_group([0])
    (given,) = made_groups.noted_lists
    assert given.members == (0,) and given.world == "HashStore"
    assert given.place == (__file__, line, "test_lists_of_members")


@in_own_process
def test_failed_creation():
    """It leaves no group."""

    @contextlib.contextmanager
    def creating(name):
        yield
        raise OSError(name)

    watch(creating)
    assert isinstance(error_of(world_of_one), OSError)
    assert made_groups.made_groups() == [] and made_groups.group_in_creation() is None


@in_own_process
def test_forgotten_groups():
    watch()
    world_of_one()
    dist.new_group([0])
    assert made_groups.count_of_groups() == 2 and made_groups.noted_lists
    watched_groups.forget_groups()
    assert made_groups.count_of_groups() == 0 and not made_groups.noted_lists
    assert made_groups.number_of_group(dist.group.WORLD) is None


def test_reconfigured_groups():
    """Its new members are noted beside the old ones; of a group on its way, only this process is known."""
    watched_groups.noted_groups[:] = [made_groups.MadeGroup("0", "default_pg", (0, 1, 2), 2, "1", 1, "x")]

    class Group:
        def size(self):
            return 2

        def rank(self):
            return 1

    group, is_over = Group(), True
    work = SimpleNamespace(is_completed=lambda: is_over)
    reconfigure = watched_groups._watched_reconfigure("reconfigure", lambda group, options: work)
    made_groups.numbers_of_groups[group] = 0
    try:
        assert reconfigure(group, SimpleNamespace(uuid=5)) is work
        is_over = False
        reconfigure(group, SimpleNamespace(uuid=6))
        reconfigure(Group(), SimpleNamespace(uuid=7))
        found = [(one.members, one.index, one.world, one.is_reconfigured) for one in made_groups.made_groups()]
        assert found == [((0, 1, 2), 2, "1", False), ((0, 1), 1, "5", True), ((0,), 0, "6", True)]
        assert made_groups.number_of_group(group) == 2
    finally:
        watched_groups.noted_groups.clear()


@in_own_process
def test_nan_checks():
    """NCCL's setting counts for its new backend while a group of it is made, unless that has one of its own."""
    name = "TORCH_DIST_NAN_CHECK"
    for setting, backend, expected in (("1", "nccl", "1"), ("1", "gloo", None), ("0", "nccl", None)):
        os.environ.pop(name, None)
        os.environ["TORCH_NCCL_NAN_CHECK"] = setting
        with watched_groups._nan_check(backend):
            assert os.environ.get(name) == expected
        assert name not in os.environ
    os.environ.update({name: "0", "TORCH_NCCL_NAN_CHECK": "1"})
    with watched_groups._nan_check("nccl"):
        assert os.environ[name] == "0"


@in_own_process
def test_origin_of_stores():
    file = dist.FileStore("/tmp/../tmp/watched_groups", 1)
    assert watched_groups._world_of(dist.PrefixStore("a", dist.PrefixStore("b", file))) == "/tmp/watched_groups"
    assert watched_groups._world_of(dist.HashStore()) == "HashStore"


@in_own_process
def test_a_server_that_nobody_is():
    """A world is known under its later name while its rank connects, and no longer when that fails."""
    watch()
    seen = []

    class Noted(list):
        def append(self, group):
            seen.append(group)
            super().append(group)

    with socket.socket() as silent, mock.patch.object(watched_groups, "groups_in_creation", Noted()) as creating:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        place = {"rank": 1, "world_size": 3, "timeout": timedelta(seconds=1)}
        error = error_of(lambda: dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **place))
    assert isinstance(error, dist.DistError), error
    (world,) = seen
    assert (world.name, world.description, world.members, world.index) == ("0", "default_pg", (0, 1, 2), 1)
    assert (world.world, world.timeout) == (str(port), 1) and not creating


@in_own_process
def test_a_program_that_makes_stores_itself(monkeypatch):
    """Its function need not name its arguments."""
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    create = rendezvous._create_c10d_store
    monkeypatch.setattr(rendezvous, "_create_c10d_store", lambda *args, **kwargs: create(*args, **kwargs))
    watch()
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    dist.destroy_process_group()
