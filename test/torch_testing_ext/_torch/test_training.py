"""What the compiler of data-parallel steps knows of autograd, optimizers and DTensor."""

import pytest
import torch
import torch.distributed.tensor
from kit.own_process import in_own_process
from kit.plain_groups import fake_world, world_of_one
from torch import nn

from torch_testing_ext._torch import training

ATEN = torch.ops.aten


def dtensor():
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    fake_world(2)
    mesh = init_device_mesh("cpu", (2,))
    # Not by `distribute_tensor`: before 2.13 it takes what the fake group has scattered.
    return DTensor.from_local(torch.arange(2.0), mesh, [Shard(0)], run_check=False)


@in_own_process
def test_local_tensors():
    tensor = dtensor()
    local = training.local_tensor(tensor)
    assert local.tolist() == [0, 1] and local.data_ptr() == tensor.to_local().data_ptr()
    training.set_local_tensor(tensor, torch.ones(2))
    assert tensor.to_local().tolist() == [1, 1]


@in_own_process
def test_dtensors_like_others():
    tensor = dtensor()
    for dtype in (torch.float32, torch.float64):
        made = training.dtensor_like(tensor, torch.ones(2, dtype=dtype))
        assert made.dtype is dtype and made.to_local().dtype is dtype and made.to_local().tolist() == [1, 1]
        assert (made.shape, made.stride(), made.placements) == (tensor.shape, tensor.stride(), tensor.placements)

    class Own(type(tensor)):
        pass

    local = training.local_tensor(tensor)
    own = training.dtensor_like(tensor, local, Own, requires_grad=True)
    assert type(own) is Own and own.requires_grad and not training.dtensor_like(tensor, local, Own).requires_grad
    assert training.local_tensor(own) is local


@pytest.mark.parametrize(
    ("operation", "args", "kwargs", "written"),
    [
        (ATEN.add_.Tensor, ("a", "b"), {}, ["a"]),
        (ATEN.add.Tensor, ("a", "b"), {}, []),
        (ATEN.add.out, ("a", "b"), {"out": "c"}, ["c"]),
        (ATEN.view.default, ("a", [1]), {}, []),
        (ATEN.copy_.default, (), {"self": "a", "src": "b"}, ["a"]),
        (ATEN._foreach_add_.List, (["a", "b"], ["c", "d"]), {}, [["a", "b"]]),
    ],
)
def test_writes(operation, args, kwargs, written):
    assert training.written_by(operation, args, kwargs) == written


@pytest.mark.parametrize(
    ("operation", "depends", "is_read"),
    [
        (ATEN.bernoulli.default, True, False),
        (ATEN.rand_like.default, True, False),
        (ATEN.uniform_.default, True, False),
        (ATEN.add.out, True, False),
        (ATEN.add.Tensor, False, False),
        (ATEN._local_scalar_dense.default, False, True),
    ],
)
def test_kinds_of_operations(operation, depends, is_read):
    assert training.depends_on_places(operation) is depends
    assert training.is_read_of_number(operation) is is_read


def test_memory():
    tensor = torch.arange(6.0)
    view, other = tensor[2:], tensor.clone()
    assert training.storage_key(view) == training.storage_key(tensor) != training.storage_key(other)
    assert training.key_of(tensor.untyped_storage()) == training.storage_key(tensor)
    assert (training.holders_of_memory(tensor), training.holders_of_memory(other)) == (2, 1)


def test_references():
    tensor = torch.arange(6.0)[2:]
    reference = training.MemoryReference(tensor)
    kind = tensor.shape, tensor.stride(), tensor.dtype
    again = reference.tensor(*kind)
    assert again.tolist() == [2, 3, 4, 5] and again.data_ptr() == tensor.data_ptr()
    assert reference.tensor(torch.Size([2]), (1,), torch.float32) is None
    del tensor, again
    assert reference.tensor(*kind) is None


def test_below_torch_function():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "theirs"

    own = torch.ones(1).as_subclass(Own)
    assert torch.neg(own) == "theirs"
    with training.below_torch_function():
        assert torch.neg(own).item() == -1


def test_backwards():
    seen = []
    parameter = nn.Parameter(torch.ones(1))

    def hook(gradient):
        seen.append(training.is_in_backward())
        training.at_end_of_backward(lambda: seen.append(parameter.grad is not None))

    parameter.register_hook(hook)
    (parameter * 2).sum().backward()
    assert seen == [True, True] and not training.is_in_backward()


@in_own_process
def test_gathering():
    world_of_one()
    whole = torch.zeros(2)
    training.gather_into(whole, torch.ones(2), None).wait()
    assert whole.tolist() == [1, 1]


def ours(*_):
    """A hook of this package."""


ours.__module__ = "torch_testing_ext" + ".x"


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_optimizers(register):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    getattr(optimizer, register)(ours)
    assert not training.optimizer_has_hooks(optimizer)
    handle = getattr(optimizer, register)(lambda *_: None)
    assert training.optimizer_has_hooks(optimizer)
    handle.remove()
    assert not training.optimizer_has_hooks(optimizer)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_all_optimizers(when):
    from torch.optim import optimizer as module

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    handle = getattr(module, f"register_optimizer_step_{when}_hook")(lambda *_: None)
    try:
        assert training.optimizer_has_hooks(optimizer)
    finally:
        handle.remove()
    assert not training.optimizer_has_hooks(optimizer)


def test_schedulers():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not training.is_wrapped_by_scheduler(optimizer.step)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert training.is_wrapped_by_scheduler(optimizer.step)


def test_hooks_of_gradients():
    parameter = nn.Parameter(torch.ones(1))
    assert training.gradient_hooks(parameter) == 0
    parameter.register_hook(ours)
    parameter.register_hook(lambda gradient: None)
    first = parameter.register_post_accumulate_grad_hook(lambda one: order.append("first"))
    parameter.register_post_accumulate_grad_hook(lambda one: order.append("second"))
    assert training.gradient_hooks(parameter) == 3
    order = []
    assert [training.run_hook_last(parameter, first) for _ in range(2)] == [False, True]
    parameter.sum().backward()
    assert order == ["second", "first"]


def test_versions():
    tensor = torch.ones(2)
    before = training.version_of(tensor)
    tensor[1:].add_(1)
    assert training.version_of(tensor) == before + 1


def test_copies():
    targets, sources = [torch.zeros(2), torch.zeros(1)], [torch.ones(2), torch.full((1,), 2.0)]
    training.copy_all(targets, sources)
    training.copy_all([], [])
    assert [one.tolist() for one in targets] == [[1, 1], [2]] and targets[0] is not sources[0]


def test_functions_outside_of_the_compiler():
    function = training.outside_dynamo(lambda number: number + 1)
    assert function(2) == 3
