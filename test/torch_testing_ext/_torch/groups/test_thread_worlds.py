"""Each thread has a world of groups."""

import sys
import threading
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from kit.own_process import in_own_process
from kit.plain_groups import world_of_one

from torch_testing_ext._torch.groups import thread_worlds


@in_own_process
def test_world():
    before = thread_worlds.get_world()
    world_of_one()
    other = thread_worlds.world_class()()
    thread_worlds.set_world(other)
    assert thread_worlds.get_world() is other and not dist.is_initialized()
    thread_worlds.set_world(before)
    assert dist.is_initialized()


@in_own_process
def test_names_of_groups_by_thread():
    """While threads are isolated, each knows only its own group of a name."""
    from torch._C._distributed_c10d import _register_process_group, _resolve_process_group

    thread_worlds.isolate_threads(True)
    world_of_one()
    found = []

    def look():
        try:
            found.append(_resolve_process_group("ours"))
        except RuntimeError:
            found.append(None)

    _register_process_group("ours", dist.group.WORLD)
    for isolated in (True, False):
        thread_worlds.isolate_threads(isolated)
        if not isolated:
            _register_process_group("ours", dist.group.WORLD)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found[0] is None and found[1] is not None


@in_own_process
def test_plugins():
    dist.Backend.register_backend("ours", lambda *_: None, devices=["cpu"])
    other = object()
    thread_worlds.set_backend_plugin("ours", other)
    assert thread_worlds.backend_plugin("OURS") is other


def test_finished_work():
    work = thread_worlds.finished_work([3])
    assert work.is_completed() and work.wait() and work.get_future().value() == [3]


def test_one_sharding_at_a_time():
    """The lock is there for as long as it is needed."""

    class Propagator:
        _fake_mode_lock = None

    name = "torch.distributed.tensor._sharding_prop"
    with mock.patch.dict(sys.modules, {name: SimpleNamespace(ShardingPropagator=Propagator)}):
        with thread_worlds.one_sharding_at_a_time(), Propagator._fake_mode_lock:
            assert not Propagator._fake_mode_lock.acquire(blocking=False)
        assert Propagator._fake_mode_lock is None
    for module in ({}, {name: SimpleNamespace(ShardingPropagator=object)}):
        with mock.patch.dict(sys.modules, {name: None, **module}), thread_worlds.one_sharding_at_a_time():
            pass
