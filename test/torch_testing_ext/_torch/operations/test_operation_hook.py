"""Every operation of c10d tells a listener, before it is issued and after."""

import pytest
import torch
import torch.distributed as dist
from kit.own_process import error_of, in_own_process
from kit.plain_groups import fake_world, world_of_one

from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext._torch.operations.operation_hook import OpSpec, hook


class Listener:
    def __init__(self):
        self.heard = []
        self.result = None

    def before(self, spec, args):
        op = operation_hook.name_of_reduce_op(hook.reduce_op_of(spec, args))
        assert hook.latest_reduce_op_of(spec, args) == hook.reduce_op_of(spec, args)
        root = None if spec.root is None else args[spec.root]
        self.heard.append((spec.kind, op, root, operation_hook.is_synchronous(spec, args)))
        self.group = operation_hook.group_of(spec, args)
        return len(self.heard)

    def after(self, spec, known, args, result):
        self.heard.append(("after", known))
        return self.result

    def raised(self, known):
        self.heard.append(("raised", known))


def listening():
    listener = Listener()
    hook.tell(listener)
    return listener


@in_own_process
def test_operations():
    world_of_one()
    listener = listening()
    group = dist.new_group([0])
    listener.heard.clear()
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX, group=group)
    assert listener.heard == [("all_reduce", "max", None, True), ("after", 1)]
    assert listener.group is group
    listener.heard.clear()
    dist.broadcast(torch.ones(2), 0, async_op=True).wait()
    assert listener.heard[0] == ("broadcast", None, 0, False) and listener.group is dist.group.WORLD
    listener.heard.clear()
    options = dist.distributed_c10d.BroadcastOptions()
    options.rootRank = 7
    assert error_of(lambda: group.broadcast([torch.ones(2)], options))
    assert listener.heard == [("broadcast", None, 7, False), ("raised", 1)]


@in_own_process
def test_without_a_listener():
    world_of_one()
    assert not hook.is_installed
    listener = listening()
    assert hook.is_installed
    hook.leave(listener)
    tensor = torch.full((2,), 3.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3, 3] and listener.heard == []
    hook.tell(listener)
    hook.remove()
    dist.all_reduce(tensor)
    assert listener.heard == [] and not hook.is_installed and not hook.listeners


@in_own_process
def test_several_listeners():
    """Each knows an operation by what it has said of it itself; one leaves, and the others hear on."""
    world_of_one()
    first, second = listening(), listening()
    second.heard.append("before the others")
    dist.all_reduce(torch.ones(1))
    assert [first.heard[-1], second.heard[-1]] == [("after", 1), ("after", 2)]
    hook.leave(first)
    dist.all_reduce(torch.ones(1))
    assert len(first.heard) == 2 and len(second.heard) == 5
    hook.tell(first)
    hook.leave()
    dist.all_reduce(torch.ones(1))
    assert len(first.heard) == 2 and len(second.heard) == 5


@in_own_process
def test_another_result():
    world_of_one()
    listener = listening()
    own = torch._C._distributed_c10d._create_work_from_future(done := torch.futures.Future())
    done.set_result([torch.zeros(1)])
    listener.result = ([torch.zeros(1)], own.boxed())
    assert dist.all_reduce(torch.ones(1), async_op=True) is own


@pytest.mark.parametrize("shapes", [([2, 0], [0, 0]), ([1, 3], [2, 2])])
@in_own_process
def test_fake_exchanges(shapes):
    """A fake group takes tensors of any sizes, as real ones do."""
    fake_world(2)
    listener = listening()
    outputs, inputs = ([torch.ones(size) for size in sizes] for sizes in shapes)
    dist.all_to_all(outputs, inputs)
    whole = [torch.cat(tensors) for tensors in (outputs, inputs)]
    splits = [[len(tensor) for tensor in tensors] for tensors in (outputs, inputs)]
    dist.all_to_all_single(*whole, *splits)
    assert [entry[0] for entry in listener.heard if entry[0] != "after"] == ["all_to_all", "all_to_all_single"]


def test_reduce_operations():
    names = [operation_hook.name_of_reduce_op(number) for number in (None, 0, 1, 8, 9)]
    assert names == [None, "sum", "avg", "premul_sum", "reduce operation 9"]


def test_synchronous_calls():
    """Only an operation that says so."""
    spec = OpSpec("x", "x", 0, timeout=2)
    assert operation_hook.is_synchronous(spec, (0, False, 5))
    assert not operation_hook.is_synchronous(spec, (0, True, 5))
    assert not operation_hook.is_synchronous(spec, ())
    assert not operation_hook.is_synchronous(OpSpec("x", "x", 0), (0, False, 5))


def test_messages():
    assert OpSpec("send", "send", 1).is_p2p and OpSpec("recv_", "recv", 1).is_p2p
    assert not OpSpec("barrier", "barrier", 1).is_p2p


@in_own_process
def test_groups_without_data():
    world_of_one()
    assert not operation_hook.is_without_data(dist.group.WORLD)
    dist.destroy_process_group()
    fake_world()
    assert operation_hook.is_without_data(dist.group.WORLD)


@in_own_process
def test_where_operations_cannot_be_hooked():
    assert operation_hook.can_hook() is None
    del torch._C._dispatch_keyset_full_after
    assert operation_hook.can_hook() == "this torch has no torch._C._dispatch_keyset_full_after"
    torch._C._dispatch_keyset_full_after = torch._C._jit_get_all_schemas
    torch._C._jit_get_all_schemas = list
    assert operation_hook.can_hook() == "this torch has no operations of c10d that are known here"
    dist.is_available = lambda: False
    assert operation_hook.can_hook() == "this torch is built without torch.distributed"


@in_own_process
def test_operations_that_are_new():
    """Only that they are issued, and in which group, is known."""
    world_of_one()
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("ring_(Tensor x, __torch__.torch.classes.c10d.ProcessGroup process_group) -> Tensor")
    library.impl("ring_", lambda x, group: x + 1, "CPU")
    listener = listening()
    boxed = dist.group.WORLD.boxed()
    assert torch.ops.c10d.ring_(torch.ones(1), boxed).item() == 2
    assert listener.heard == [("ring", None, None, False), ("after", 1)] and listener.group is dist.group.WORLD
