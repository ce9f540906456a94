"""Attributes that a compiled function finds missing, and that the object gets later."""

import unittest
from collections.abc import Callable

import torch


class Computed:
    def __getattr__(self, name: str) -> float:
        return 2.0


class Refuses:
    def __getattr__(self, name: str) -> float:
        raise AttributeError(name)


class Plain:
    pass


class ComputedModule(torch.nn.Module):
    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return 2.0


class Forwards(ComputedModule):
    """Reads from another object what it lacks, like the wrappers of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()
        self.inner.scale = 2.0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class Remembers:
    """Keeps what it has computed."""

    def __getattr__(self, name: str) -> float:
        self.__dict__[name] = 2.0
        return 2.0


def read(tensor: torch.Tensor, thing: object) -> torch.Tensor:
    try:
        return tensor * thing.scale
    except AttributeError:
        return tensor * 2


def set_attribute(thing: object) -> None:
    thing.scale = 7.0


class MissingAttributeTest(unittest.TestCase):
    def reads(self, thing: object, change: Callable = set_attribute) -> list[float]:
        """The values of a compiled read: twice before the change, and twice after it."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(read, backend="eager", fullgraph=True)
        values = [compiled(torch.ones(1), thing).item() for _ in range(2)]
        change(thing)
        return [*values, *(compiled(torch.ones(1), thing).item() for _ in range(2))]

    def graphs(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def test_the_attribute_is_set(self) -> None:
        for make in (Computed, Refuses, Plain, ComputedModule, torch.nn.Module, Forwards, Remembers):
            with self.subTest(make.__name__):
                self.assertEqual(self.reads(make()), [2, 2, 7, 7])

    def test_the_dict_of_the_instance_gets_it(self) -> None:
        for make in (Computed, Plain, torch.nn.Module):
            with self.subTest(make.__name__):
                self.assertEqual(self.reads(make(), lambda thing: thing.__dict__.update(scale=7.0)), [2, 2, 7, 7])

    def test_a_module_gets_a_buffer(self) -> None:
        buffer = torch.tensor(7.0)
        self.assertEqual(self.reads(torch.nn.Module(), lambda it: it.register_buffer("scale", buffer)), [2, 2, 7, 7])

    def test_its_class_gets_the_attribute(self) -> None:
        class Own:
            pass

        def change(thing: Own) -> None:
            Own.scale = 7.0

        self.assertEqual(self.reads(Own(), change), [2, 2, 7, 7])

    def test_the_function_itself_sets_the_attribute(self) -> None:
        def step(tensor: torch.Tensor, thing: Computed) -> torch.Tensor:
            tensor = tensor * thing.scale
            thing.scale = 4.0
            return tensor

        torch._dynamo.reset()
        compiled, thing = torch.compile(step, backend="eager"), Computed()
        self.assertEqual([compiled(torch.ones(1), thing).item() for _ in range(3)], [2, 4, 4])

    def test_other_changes_do_not_compile_again(self) -> None:
        def change(thing: Computed) -> None:
            thing.other = 7.0

        for make in (Computed, Plain, torch.nn.Module):
            with self.subTest(make.__name__):
                self.assertEqual((self.reads(make(), change), self.graphs()), ([2, 2, 2, 2], 1))


if __name__ == "__main__":
    unittest.main()
