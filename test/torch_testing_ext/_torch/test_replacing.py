"""Functions of torch are replaced by one table, and restored in any order."""

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.own_process import in_own_process

from torch_testing_ext._torch import replacing
from torch_testing_ext._torch.replacing import Replacement, replaced


def adding(text, said):
    """Makes a function that says a text before it calls the one that it replaces."""

    def make(name, function):
        def call(*args, **kwargs):
            said.append(text)
            return function(*args, **kwargs)

        return call

    return make


@in_own_process
def test_within_a_context():
    said, before = [], vars(torch.Tensor).get("cpu")
    with replaced("copies in a world", adding("a", said)):
        torch.ones(1).cpu()
    torch.ones(1).cpu()
    assert said == ["a"]
    assert vars(torch.Tensor).get("cpu") is before


@in_own_process
def test_an_error_restores():
    with pytest.raises(ZeroDivisionError), replaced("copies in a world", adding("a", [])):
        raise ZeroDivisionError
    assert "torch.Tensor.cpu" not in [function.name for function in replacing.who_has_replaced_what()]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
@in_own_process
def test_any_order(order):
    """What was replaced since then stays, without the layer below it."""
    said, before = [], torch.UntypedStorage.resize_
    layers = [Replacement("sizes of storages", adding(text, said)) for text in "abc"]
    torch.ones(1).untyped_storage().resize_(4)
    assert said == ["c", "b", "a"]
    left = {0: "a", 1: "b", 2: "c"}
    for number in order:
        layers[number].undo()
        del left[number]
        said.clear()
        torch.ones(1).untyped_storage().resize_(4)
        assert said == [*reversed(left.values())]
    assert torch.UntypedStorage.resize_ is before


@in_own_process
def test_a_function_of_the_program_stays():
    """It has replaced ours, and calls it."""
    said = []
    layer = Replacement("start of a world", adding("ours", said))
    ours = dist.is_available
    assert ours is dist.is_available
    inner = dist.init_process_group
    dist.init_process_group = lambda *args, **kwargs: said.append("theirs")
    theirs = dist.init_process_group
    layer.undo()
    assert dist.init_process_group is theirs
    assert dist.distributed_c10d.init_process_group is not inner


@in_own_process
def test_who_has_replaced_what():
    # The kit notes the first use of an accelerator, and groups.
    before = replacing.who_has_replaced_what()
    assert not any(function.is_by_program for function in before)
    layer = Replacement("copies in a world", adding("a", []))
    dist.barrier = lambda *args, **kwargs: None
    new = [function for function in replacing.who_has_replaced_what() if function not in before]
    theirs, ours = sorted(new, key=lambda function: not function.is_by_program)
    assert str(theirs).startswith(f"torch.distributed.barrier: {__file__}:")
    assert str(ours).startswith("torch.Tensor.cpu: torch_testing_ext hears of values")
    layer.undo()
    assert len(replacing.who_has_replaced_what()) == len(before) + 1


@in_own_process
def test_functions_that_torch_lacks():
    assert [*replacing.functions_of("first use of other accelerators", ["no_such_device"])] == []
    assert Replacement("first use of other accelerators", adding("a", []), ["no_such_device"]).undo() is None


@pytest.mark.parametrize(
    "other",
    [lambda self: None, staticmethod(lambda: None), classmethod(lambda cls: None), property(lambda self: None)],
    ids=["function", "static", "of the class", "property"],
)
@in_own_process
def test_functions_of_the_program(other):
    """Whatever kind of function it is, the program has replaced it; nobody is warned about names of torch."""
    torch.Tensor.cpu = other
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = (function for function in replacing.who_has_replaced_what() if function.is_by_program)
    assert str(found).startswith(f"torch.Tensor.cpu: {__file__}:")


@in_own_process
def test_names_of_owners():
    """Of classes and modules in which a program is not expected to replace anything."""
    for purpose, name in (
        ("sizes of storages", "torch.storage.UntypedStorage.resize_"),
        ("differences of tensors", "torch.testing._comparison.not_close_error_metas"),
    ):
        layer = Replacement(purpose, adding("a", []))
        assert name in [function.name for function in replacing.who_has_replaced_what()]
        layer.undo()
        assert name not in [function.name for function in replacing.who_has_replaced_what()]


@in_own_process
def test_a_mock_of_the_program():
    with mock.patch.object(dist, "barrier"):
        (found,) = (function for function in replacing.who_has_replaced_what() if function.is_by_program)
    assert str(found) == "torch.distributed.barrier: a mock"


@in_own_process
def test_lines_of_the_table():
    def line():
        return next(line for line in replacing.lines_of_table() if line.startswith("has the default group"))

    assert len([*replacing.lines_of_table()]) == len(replacing.TABLE)
    known = line()
    assert known.endswith("; torch.distributed.distributed_c10d: init_process_group")
    del dist.init_process_group
    assert line() == f"{known} (this torch lacks torch.distributed.init_process_group)"


@pytest.mark.parametrize("purpose", replacing.TABLE)
def test_rows(purpose):
    row = replacing.TABLE[purpose]
    assert row.why and row.functions
    assert all(owner.startswith("torch") for owner in row.functions)
    if not row.lasts:
        with pytest.raises(AssertionError):
            replacing.replace_for_good(purpose, adding("a", []))
