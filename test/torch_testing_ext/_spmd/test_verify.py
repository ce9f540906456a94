"""Verification of programs against the engine: faults must be noticed, and undone on all ranks."""

import contextlib
import unittest
from unittest import mock

import pytest
import torch
from spmd_training import MLP, Mixed, Normed, capture, normal_batch, step, to_device
from torch.distributed.tensor import DTensor

from torch_testing_ext._spmd import compiling, lowering
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

STYLES = parametrize("style", ["replicate", "fully_shard"])


@contextlib.contextmanager
def doubled_gradients():
    """A fault: the sum of the gradients instead of their mean."""
    plain = lowering.call

    def wrong(graph, target, *args, **kwargs):
        if target is torch.ops.aten.mul_.Tensor:
            args = (args[0], 1.0)
        return plain(graph, target, *args, **kwargs)

    with mock.patch.object(lowering, "call", wrong):
        yield


def dropping_step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    loss = (torch.dropout(model(x), 0.5, True) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


class TestVerify(DTensorContinuousTestBase):
    """Programs that are wrong must be noticed, and undone on all ranks."""

    @property
    def world_size(self):
        return 2

    def setup(self, style="replicate", model=Normed, function=step, momentum=0.9, **options):
        torch.manual_seed(self.rank)
        self.model = model().to(self.device_type)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=momentum)
        self.step = capture(parallel_mode=DataParallel(style), **options)(function)

    def call(self, number, size=6):
        batch = normal_batch(size, 3, 9) if isinstance(self.model, Normed) else normal_batch(size, 10)
        return self.step(self.model, self.optimizer, to_device(batch(self.rank, number), self.device_type))

    def state(self):
        """The values of everything, and the objects that are parameters."""
        local = lambda t: (t.to_local() if isinstance(t, DTensor) else t).detach().clone()  # noqa: E731
        tensors = {name: local(t) for name, t in (*self.model.named_parameters(), *self.model.named_buffers())}
        for name, p in self.model.named_parameters():
            tensors[f"gradient of {name}"] = None if p.grad is None else local(p.grad)
            for key, value in self.optimizer.state.get(p, {}).items():
                tensors[f"{key} of {name}"] = local(value) if isinstance(value, torch.Tensor) else value
        tensors["random"] = torch.get_rng_state()
        return tensors, list(map(id, self.model.parameters()))

    @contextlib.contextmanager
    def refused(self, text):
        """The call in this context raises an error and changes nothing."""
        (before, objects), batch = self.state(), None
        with self.assertRaisesRegex(SPMDError, text):
            yield batch
        (after, same) = self.state()
        self.assertEqual(after, before, rtol=0, atol=0)
        self.assertEqual(objects, same)

    @STYLES
    def test_wrong_first_program(self, style):
        self.setup(style, momentum=0)
        with self.refused("gradient of .* differs by up to .* on rank 0"), doubled_gradients():
            self.call(0)
        self.call(0)
        self.assertIn("verified 1 times", str(self.step.report()))
        self.assertNotIn("not verified", str(self.step.report()))

    @pytest.mark.slow
    @STYLES
    def test_wrong_later_program(self, style):
        self.setup(style)
        self.call(0)
        with self.refused("not equivalent to the engine"), doubled_gradients():
            self.call(1)
        self.call(1)
        self.call(2)
        self.model.eval()
        with self.refused("not equivalent to the engine"), doubled_gradients():
            self.call(3)

    def test_difference_on_one_rank_is_named_on_all(self):
        self.setup(model=lambda: MLP((10, 8, 4)), momentum=0)
        fault = contextlib.nullcontext()
        if self.rank == 1:
            record = compiling.record_run

            def wrong(result, *args):
                return record(result * 1.5 if result.requires_grad else result, *args)

            fault = mock.patch.object(compiling, "record_run", wrong)
        with self.refused("result 0 differs by up to .* on rank 1"), fault:
            self.call(0)

    @pytest.mark.slow
    def test_off_and_always(self):
        self.setup(verify="off")
        with doubled_gradients():
            self.call(0)
        self.assertIn("not verified", str(self.step.report()))
        self.setup(verify="always")
        self.call(0)
        self.call(1)
        for number in range(2, 5):
            program = self.step.last
            run = program.run
            with self.refused("not equivalent"):
                program.run = lambda inputs, run=run: [
                    2 * out if isinstance(out, torch.Tensor) and out.dim() == 0 else out for out in run(inputs)
                ]
                self.call(number)
            self.call(number)  # recorded again

    @STYLES
    def test_random_calls_are_verified(self, style):
        self.setup(style)
        drawn = [call for call in range(1000) if compiling.is_drawn(0, call)]
        self.assertTrue(3 < len(drawn) < 30, drawn)
        for number in range(4):
            self.call(number)
        program = self.step.last
        self.assertEqual(program.verified, 1)
        with mock.patch.object(compiling, "is_drawn", lambda step, call: True):
            self.call(4)
            self.assertEqual(program.verified, 2)
            with self.refused("the model is in eval|training of"):
                program.run, run = (lambda inputs: self.model.eval() and run(inputs)), program.run
                self.call(5)
        self.assertTrue(self.model.training)
        self.call(6)

    @pytest.mark.slow
    @STYLES
    def test_random_numbers_are_drawn_once(self, style):
        results = []
        for mode in ("off", "always"):
            self.setup(style, Mixed, dropping_step, verify=mode)
            torch.manual_seed(5)
            results.append(([self.call(i) for i in range(3)], *self.state()[0].values()))
        self.assertEqual(*results, rtol=0, atol=0)

    def test_unknown_mode(self):
        with self.assertRaisesRegex(SPMDError, "'first', 'always', 'off'"):
            capture(verify="never")


instantiate_parametrized_tests(TestVerify)


class TestDifferences(unittest.TestCase):
    """What counts as rounding."""

    def compare(self, mine, theirs, **options):
        runs = [{name: torch.tensor(values) for name, values in run.items()} for run in (mine, theirs)]
        return compiling.first_difference(*runs, **options)

    def test_what_follows_from_a_gradient_that_differs(self):
        """The first two elements of the gradient are sums that cancel: they differ, relative to themselves."""
        grads = {"gradient of w": [2.0e-5, -3.0e-3, 1.0]}, {"gradient of w": [2.1e-5, -3.00009e-3, 1.0]}
        for name in ("parameter w", "state['exp_avg'] of w"):
            with self.subTest(name):
                expected = {**grads[0], name: [1.0, 2.0, 3.0]}
                self.assertIsNone(self.compare({**grads[1], name: [1.5, 2.0, 3.0]}, expected))
                wrong = self.compare({**grads[1], name: [1.0, 2.5, 3.0]}, expected)
                self.assertRegex(wrong, "differs by up to 0.5")
                self.assertIsNotNone(self.compare({**grads[1], name: [1.0, 2.0, 3.5]}, expected))
                self.assertIsNotNone(self.compare({**grads[0], name: [1.5, 2.0, 3.0]}, expected))
        expected = {**grads[0], "buffer w": [1.0, 2.0, 3.0]}
        self.assertIsNotNone(self.compare({**grads[1], "buffer w": [1.5, 2.0, 3.0]}, expected))

    def test_kernels_that_switch_a_relu(self):
        """A part of one element of a gradient is missing, which shifts all those before it a little."""
        theirs = {"gradient of w": [1.0] * 400, "result 0": [1.0] * 400}
        for changed, all_of_them, accepted in (
            (1.04, 1.0, True),
            (1.06, 1.0, False),
            (1.0, 1.005, True),
            (1, 1.02, False),
        ):
            with self.subTest(changed=changed, all_of_them=all_of_them):
                mine = [changed * all_of_them, *[all_of_them] * 399]
                differing = {**theirs, "gradient of w": mine}
                self.assertIsNotNone(self.compare(differing, theirs))
                self.assertEqual(self.compare(differing, theirs, same_kernels=False) is None, accepted)
                self.assertIsNotNone(self.compare({**theirs, "result 0": mine}, theirs, same_kernels=False))
        self.assertIsNotNone(
            self.compare({"gradient of w": [float("nan")]}, {"gradient of w": [1.0]}, same_kernels=False)
        )


if __name__ == "__main__":
    run_tests()
