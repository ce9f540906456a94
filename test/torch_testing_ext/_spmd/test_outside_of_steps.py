"""Models are used between calls of their step, and teachers in it, with the numbers of DDP."""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from alias_loops import LOOPS as ALIASES
from loop_comparison import compare
from loops import Parallel, adam, error, update, whole
from outside_loops import LOOPS, TEACHERS
from torch import nn

from torch_testing_ext._spmd.roster import EARLY
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError, compile
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase


class TestOutsideOfSteps(DTensorContinuousTestBase):
    """Models are used between calls, on two persistent ranks."""

    world_size = 2

    @parametrize("style, early", [("replicate", EARLY), ("fully_shard", EARLY), ("fully_shard", 0)])
    @parametrize("name", [*LOOPS])
    def test_equals_ddp(self, name, style, early):
        compare(self, name, style, early, LOOPS)


class TestTeachers(DTensorContinuousTestBase):
    """Teachers in the step, on three ranks, of which the last has no rows of some parameters."""

    world_size = 3

    @parametrize("style, early", [("replicate", EARLY), ("fully_shard", EARLY), ("fully_shard", 0)])
    @parametrize("name", [*TEACHERS])
    def test_equals_ddp(self, name, style, early):
        compare(self, name, style, early, TEACHERS)


class TestAliases(DTensorContinuousTestBase):
    """Something else shares memory with a parameter or a gradient, on two ranks."""

    world_size = 2

    @parametrize("style, early", [("replicate", EARLY), ("fully_shard", EARLY), ("fully_shard", 0)])
    @parametrize("name", [*ALIASES])
    def test_equals_ddp(self, name, style, early):
        compare(self, name, style, early, ALIASES)


class Dropping(nn.Module):
    """Buffers and random numbers change in each forward."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3)

    def forward(self, x):
        return self.b(self.drop(self.norm(self.a(x))))


class TestRefusals(DTensorContinuousTestBase):
    """What cannot be followed is refused by name, and nothing has changed then."""

    world_size = 2

    def _trained(self, style, calls=2):
        torch.manual_seed(self.rank)
        model = Dropping()
        optimizer = adam(model)
        step = compile(parallel_mode=DataParallel(style))(update)
        for call in range(calls):
            step(model, optimizer, Parallel(self.rank).batch(call))
        return model, optimizer, step

    def _state(self, model, optimizer):
        params = [*model.parameters()]
        states = [[whole(value) for value in values.values()] for values in optimizer.state.values()]
        grads = [None if param.grad is None else whole(param.grad) for param in params]
        return [whole(param) for param in params], [*map(id, params)], grads, states, [*model.buffers()]

    @parametrize("style", ["replicate", "fully_shard"])
    @parametrize("calls", [0, 2, 10])
    def test_refused_at_the_end(self, style, calls):
        model, optimizer, step = self._trained(style, calls)
        others = nn.Linear(6, 6)
        x, y = Parallel(self.rank).batch(20)
        inputs = others(x)
        before, random = copy.deepcopy(self._state(model, optimizer)), torch.get_rng_state()
        with self.assertRaisesRegex(SPMDError, "no module or optimizer holds"):
            step(model, optimizer, (inputs, y))
        self.assertEqual(self._state(model, optimizer), before)
        self.assertEqual(torch.get_rng_state(), random)
        self.assertIsNone(others.weight.grad)
        step(model, optimizer, (inputs.detach(), y))

    @parametrize("style", ["replicate", "fully_shard"])
    def test_refused_under_no_grad(self, style):
        model, optimizer, step = self._trained(style)
        before, random = copy.deepcopy(self._state(model, optimizer)), torch.get_rng_state()
        with torch.no_grad(), self.assertRaisesRegex(SPMDError, "under no_grad"):
            step(model, optimizer, Parallel(self.rank).batch(20))
        self.assertEqual(self._state(model, optimizer), before)
        self.assertEqual(torch.get_rng_state(), random)

    def test_traced_between_calls(self):
        model, optimizer, step = self._trained("fully_shard")
        x = Parallel(self.rank).batch(20)[0]
        with self.assertRaisesRegex(SPMDError, "torch.jit traces a model whose parameters rest as DTensors"):
            torch.jit.trace(model, x)
        step(model, optimizer, Parallel(self.rank).batch(3))

    @parametrize("style", ["replicate", "fully_shard"])
    @parametrize("calls", [1, 10])
    def test_two_parameters_with_one_gradient(self, style, calls):
        model, optimizer, _ = self._trained(style, calls)

        @compile(parallel_mode=DataParallel(style))
        def step(batch):
            model.a.bias.grad = model.norm.bias.grad = torch.zeros(5)
            error(model, batch).backward()
            optimizer.step()

        before = [whole(param) for param in model.parameters()]
        with self.assertRaisesRegex(SPMDError, "gradients of .*bias and .*bias are one tensor"):
            step(Parallel(self.rank).batch(20))
        self.assertEqual([whole(param) for param in model.parameters()], before)

    @parametrize("style", ["replicate", "fully_shard"])
    @parametrize("calls", [1, 10])
    def test_one_gradient_from_call_to_call(self, style, calls):
        model, optimizer, _ = self._trained(style, calls)

        @compile(parallel_mode=DataParallel(style))
        def step(batch):
            error(model, batch).backward()
            model.a.bias.grad = model.norm.bias.grad
            optimizer.step()

        step(Parallel(self.rank).batch(20))
        with self.assertRaisesRegex(SPMDError, "are one tensor"):
            step(Parallel(self.rank).batch(21))

    def test_rows_of_the_last_call(self):
        model, optimizer, _ = self._trained("fully_shard")
        hidden = [[[[[[[param.data for param in model.parameters()]]]]]]]

        @compile(parallel_mode=DataParallel("fully_shard"))
        def step(batch):
            update(model, optimizer, batch)
            return [data * 1 for data in hidden[0][0][0][0][0][0]]

        with self.assertRaisesRegex(SPMDError, "uses a DTensor of parameter a.weight from between calls"):
            step(Parallel(self.rank).batch(20))

    def test_gradients_of_operations_between_calls(self):
        model, optimizer, step = self._trained("fully_shard")
        x, y = Parallel(self.rank).batch(20)
        with self.assertRaisesRegex(SPMDError, "torch.autograd.grad was called outside"):
            torch.autograd.grad(model(x).sum(), [*model.parameters()])
        inputs = x + model.a.weight.sum()
        before = copy.deepcopy(self._state(model, optimizer))
        with self.assertRaisesRegex(SPMDError, "computed from parameter a.weight between calls"):
            step(model, optimizer, (inputs, y))
        self.assertEqual(self._state(model, optimizer), before)

    def test_gradients_that_are_hidden(self):
        """A loss of an earlier evaluation, which the step finds, is no input; its backward in the step is refused."""
        for hidden in (lambda model, x: model.a.weight.sum(), lambda model, x: model(x).sum()):
            model, optimizer, _ = self._trained("fully_shard")
            x, y = Parallel(self.rank).batch(20)
            history, learns = [hidden(model, x)], [False]

            @compile(parallel_mode=DataParallel("fully_shard"))
            def step(batch, model=model, optimizer=optimizer, history=history, learns=learns):
                optimizer.zero_grad()
                (error(model, batch) + (history[0] if learns[0] else 0)).backward()
                optimizer.step()

            step((x, y))
            learns[0] = True
            with self.assertRaisesRegex(SPMDError, "reached parameter .* through an operation between calls"):
                step((x, y))

    def test_data_of_another_shape(self):
        model, _, _ = self._trained("fully_shard")
        with self.assertRaisesRegex(SPMDError, "Set it in the step"):
            model.a.weight.data = torch.zeros(2, 6)


instantiate_parametrized_tests(TestRefusals)
instantiate_parametrized_tests(TestAliases)
instantiate_parametrized_tests(TestOutsideOfSteps)
instantiate_parametrized_tests(TestTeachers)

if __name__ == "__main__":
    run_tests()
