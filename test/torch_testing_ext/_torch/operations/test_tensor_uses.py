"""The tensors that operations read and write are reported, by compiled programs as by others."""

import json
import unittest

import pytest
import torch
from kit.own_process import in_own_process
from kit.plain_groups import world_of_one
from kit.processes import output_of_python

from torch_testing_ext._torch.operations import tensor_uses
from torch_testing_ext._torch.operations.tensor_uses import TensorUses


class Uses(list):
    """The uses of named tensors."""

    def __init__(self, **tensors):
        self._names = {id(tensor): name for name, tensor in tensors.items()}

    def note(self, name, read, written):
        self.append((name, *("".join(self._names.get(id(one), "?") for one in tensors) for tensors in (read, written))))


def test_reads_and_writes():
    a, b = torch.ones(2), torch.zeros(2)
    uses = Uses(a=a, b=b)
    with TensorUses(uses.note):
        a.add_(b)
        torch.add(a, b, out=b)
        torch.cat([a, b])
        b.view(2), a.t()
    assert uses == [("aten.add_.Tensor", "b", "a"), ("aten.add.out", "ab", "b"), ("aten.cat", "ab", "")]


def test_operations_have_the_names_by_which_programs_call_them():
    aten = torch.ops.aten
    for func, name in (
        (aten._unique2.default, "unique"),
        (aten.unique_dim.default, "unique"),
        (aten.unique_consecutive.default, "unique_consecutive"),
        (aten.equal.default, "equal"),
    ):
        assert tensor_uses.name_in_python(func) == name


@in_own_process
def test_collectives_are_left_out():
    import torch.distributed as dist

    world_of_one()
    uses = Uses()
    with TensorUses(uses.note):
        dist.all_reduce(torch.ones(1))
    assert [use[0] for use in uses] == ["aten.ones"]


def test_operations_of_subclasses():
    """A mode may leave them to their class, and hears of all that has run."""

    class Mode(TensorUses):
        def leaves(self, types):
            return Own in types

        def after(self, func, args, kwargs, result):
            done.append(tensor_uses.name_of(func))

    class Own(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return theirs

    done, theirs = [], torch.zeros(3)
    own = torch.Tensor._make_subclass(Own, torch.ones(1))
    with Mode(None):
        assert torch.neg(own) is theirs
        torch.ones(2).view(1, 2)
    assert done == ["aten::ones", "aten::view"]


# Needs an interpreter of its own: it imports the compiler after the mode has begun, as a test may.
PROGRAM = """
import json, sys, warnings
import torch
from torch_testing_ext._torch.operations.tensor_uses import TensorUses
uses = []
with warnings.catch_warnings(record=True) as caught, TensorUses(lambda name, read, written: uses.append(name)):
    warnings.simplefilter("always")
    assert "torch._dynamo" not in sys.modules
    before = torch.ones(3)
    compiled = torch.compile(lambda tensor: (tensor + 1) * 2, backend="eager")
    results = [compiled(before).tolist() for _ in range(2)]
ours = [str(warning.message) for warning in caught if "operation_hook" in f"{warning.message} {warning.filename}"]
print(json.dumps([results, uses, ours]))
"""


@pytest.mark.slow
class CompiledTest(unittest.TestCase):
    def test_uses_are_the_same_and_there_is_no_warning(self):
        results, uses, warnings = json.loads(output_of_python("-c", PROGRAM).splitlines()[-1])
        self.assertEqual(results, [[4.0] * 3] * 2)
        self.assertEqual(uses, ["aten.ones", *["aten.add.Tensor", "aten.mul.Tensor"] * 2])
        self.assertEqual(warnings, [])


if __name__ == "__main__":
    unittest.main()
