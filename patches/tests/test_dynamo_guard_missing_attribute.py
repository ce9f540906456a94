# Owner(s): ["module: dynamo"]
# In PyTorch: test/dynamo/test_misc.py

import torch
import torch._dynamo.test_case
import torch._dynamo.testing


class MissingAttributeTests(torch._dynamo.test_case.TestCase):
    """Attributes that a compiled function finds missing, and that appear later."""

    def _check(self, thing, change, expected=7.0, frames=2):
        def read(x):
            try:
                return x * thing.scale
            except AttributeError:
                return x * 2

        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(read, backend=counter, fullgraph=True)
        x = torch.ones(1)
        for _ in range(2):
            self.assertEqual(compiled(x), x * 2)
        change(thing)
        for _ in range(2):
            self.assertEqual(compiled(x), x * expected)
        self.assertEqual(counter.frame_count, frames)

    def _things(self):
        class Computed:
            def __getattr__(self, name):
                return 2.0

        class Refuses:
            def __getattr__(self, name):
                raise AttributeError(name)

        class Plain:
            pass

        class ComputedModule(torch.nn.Module):
            def __getattr__(self, name):
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return 2.0

        class Forwards(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Plain()
                self.inner.scale = 2.0

            def __getattr__(self, name):
                return getattr(self.inner, name)

        class Remembers:
            def __getattr__(self, name):
                self.__dict__[name] = 2.0
                return 2.0

        return [
            Computed(),
            Refuses(),
            Plain(),
            torch.nn.Module(),
            ComputedModule(),
            Forwards(),
            Remembers(),
        ]

    def test_object_gets_missing_attribute(self):
        def change(thing):
            thing.scale = 7.0

        for thing in self._things()[:-1]:
            with self.subTest(type(thing).__name__):
                self._check(thing, change)
        with self.subTest("Remembers"):
            # Its first call sets the attribute, so the second one compiles again
            self._check(self._things()[-1], change, frames=3)

    def test_instance_dict_gets_missing_attribute(self):
        for thing in self._things()[:4]:
            with self.subTest(type(thing).__name__):
                self._check(thing, lambda thing: thing.__dict__.update(scale=7.0))

    def test_module_gets_missing_buffer(self):
        self._check(
            torch.nn.Module(),
            lambda mod: mod.register_buffer("scale", torch.tensor(7.0)),
        )

    def test_class_gets_missing_attribute(self):
        def change(thing):
            type(thing).scale = 7.0

        self._check(self._things()[2], change)

    def test_function_sets_missing_attribute(self):
        def step(x, thing):
            x = x * thing.scale
            thing.scale = 4.0
            return x

        thing = self._things()[0]
        compiled = torch.compile(step, backend="eager")
        x = torch.ones(1)
        results = [compiled(x, thing).item() for _ in range(3)]
        self.assertEqual(results, [2.0, 4.0, 4.0])

    def test_other_attribute_does_not_recompile(self):
        def change(thing):
            thing.other = 7.0

        for thing in self._things()[:4]:
            with self.subTest(type(thing).__name__):
                self._check(thing, change, expected=2.0, frames=1)


if __name__ == "__main__":
    from torch._dynamo.test_case import run_tests

    run_tests()
