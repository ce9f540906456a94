"""Calls of stores by code outside of torch are told, before and after."""

import torch.distributed as dist
from kit.own_process import error_of, in_own_process
from kit.plain_groups import world_of_one

from torch_testing_ext._torch.operations.watched_stores import hooks


@in_own_process
def test_calls():
    before = dist.Store.set
    heard = []
    hooks.tell(lambda name, is_over: heard.append((name, is_over)))
    store = dist.HashStore()
    store.set("key", "1")
    assert store.get("key") == b"1" and store.add("number", 2) == 2
    names = ("set", "get", "add")
    assert heard == [(name, is_over) for name in names for is_over in (False, True)]
    hooks.leave()
    store.set("key", "2")
    assert len(heard) == 6 and dist.Store.set is before


@in_own_process
def test_calls_of_torch():
    heard = []
    hooks.tell(lambda name, is_over: heard.append(name))
    world_of_one()
    dist.new_group([0])
    assert heard == []


@in_own_process
def test_several_listeners():
    """The methods are replaced once."""
    first, second = [], []
    hooks.tell(lambda name, is_over: first.append(name))
    method = dist.Store.set
    hooks.tell(lambda name, is_over: second.append(name))
    assert dist.Store.set is method
    dist.HashStore().set("key", "1")
    assert first == second == ["set", "set"]


@in_own_process
def test_calls_that_raise():
    """A fault may be planted before the call; after one that raises, nothing is told."""
    heard = []
    hooks.tell(lambda name, is_over: heard.append((name, is_over)))
    assert error_of(lambda: dist.HashStore().get())
    assert heard == [("get", False)]

    def refuse(name, is_over):
        raise PermissionError

    store = dist.HashStore()
    hooks.leave()
    hooks.tell(refuse)
    assert isinstance(error_of(lambda: store.set("key", "1")), PermissionError)
    hooks.leave()
    assert not store.check(["key"])
