"""Verification against an eager step, and the exchange between ranks that precedes a call."""

import contextlib
import unittest
from unittest import mock

import torch
from spmd_training import MLP, Mixed, Normed, capture, normal_batch, step, to_device
from torch.distributed.tensor import DTensor

from torch_testing_ext._spmd.lower import buckets, schedule
from torch_testing_ext._spmd.run import verify
from torch_testing_ext._spmd.run.exchange import ExchangeSchedule
from torch_testing_ext._spmd.trace.substitution import reinstated
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

STYLES = parametrize("style", ["replicate", "fully_shard"])


@contextlib.contextmanager
def doubled_gradients():
    """A fault: the sum of the gradients instead of their mean."""
    with contextlib.ExitStack() as stack:
        for module in (buckets, schedule):
            stack.enter_context(mock.patch.object(module, "mean_scaled", lambda graph, flat, options, owned: flat))
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

    def setup(self, style="replicate", model=Normed, function=step, **options):
        torch.manual_seed(self.rank)
        self.model = model().to(self.device_type)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
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
        self.setup(style)
        with self.refused("gradient of .* differs by up to .* on rank 0"), doubled_gradients():
            self.call(0)
        self.call(0)
        self.assertIn("verified in", str(self.step.report()))
        self.assertNotIn("not verified", str(self.step.report()))

    @STYLES
    def test_wrong_later_program(self, style):
        self.setup(style)
        self.call(0)
        with self.refused("not equivalent to the eager step under DDP"), doubled_gradients():
            self.call(1)
        self.call(1)
        self.call(2)
        self.model.eval()
        with self.refused("not equivalent to the eager step under DDP"), doubled_gradients():
            self.call(3)

    def test_difference_on_one_rank_is_named_on_all(self):
        self.setup(model=lambda: MLP((10, 8, 4)))
        fault = contextlib.nullcontext()
        if self.rank == 1:
            run = verify.record

            def wrong(result, *args):
                return run(result * 1.5 if result.requires_grad else result, *args)

            fault = mock.patch.object(verify, "record", wrong)
        with self.refused("the result differs by up to .* on rank 1"), fault:
            self.call(0)

    def test_off_and_always(self):
        self.setup(verify="off")
        with doubled_gradients():
            self.call(0)
        self.assertIn("not verified", str(self.step.report()))
        self.setup(verify="always")
        self.call(0)
        self.call(1)
        for number in range(2, 5):
            plan, run = self.step.last, self.step.last.run
            with self.refused("not equivalent"):
                plan.run = lambda inputs, run=run: [
                    2 * out if isinstance(out, torch.Tensor) and out.dim() == 0 else out for out in run(inputs)
                ]
                self.call(number)
            plan.run = run
            self.call(number)

    def test_large_models_are_not_verified(self):
        self.setup()
        with mock.patch.object(verify, "LIMIT_BYTES", 100):
            self.call(0)
        self.assertIn("not verified: its state of", str(self.step.report()))

    @STYLES
    def test_random_numbers_are_drawn_once(self, style):
        results = []
        for mode in ("off", "always"):
            self.setup(style, Mixed, dropping_step, verify=mode)
            torch.manual_seed(5)
            results.append(([self.call(i) for i in range(3)], *self.state()[0].values()))
        self.assertEqual(*results, rtol=0, atol=0)

    def test_parameters_that_the_user_holds_are_left_alone(self):
        self.setup("fully_shard")
        held = list(self.model.parameters())
        self.call(0)
        with reinstated(held):  # they have been replaced, and refuse every use
            before = [p.detach().clone() for p in held]
        self.call(1)
        with reinstated(held):
            self.assertEqual(held, before, rtol=0, atol=0)

    def test_a_rank_that_cannot_compile_stops_the_others(self):
        self.setup()
        self.call(0)
        if self.rank == 1:
            self.model.out.weight.register_hook(lambda grad: grad)
        with self.refused("hook" if self.rank == 1 else "Rank 1 could not compile the step"):
            self.call(1)

    def test_ranks_whose_programs_part(self):
        self.setup()
        self.call(0)
        if self.rank == 1:
            self.model.conv.requires_grad_(False)
        with self.refused("The ranks differ in their collectives"):
            self.call(1)
        self.model.conv.requires_grad_(True)
        self.call(1)

    def test_unknown_mode(self):
        with self.assertRaisesRegex(SPMDError, "'first', 'always', 'off'"):
            capture(verify="never")


instantiate_parametrized_tests(TestVerify)


class TestExchangeSchedule(unittest.TestCase):
    """When ranks exchange their status."""

    def calls(self, exchanges, count, quiet=True):
        due = []
        for number in range(count):
            if exchanges.is_due():
                due.append(number)
                exchanges.conclude(quiet)
        return due

    def test_quiet_calls_lead_to_ever_longer_gaps(self):
        self.assertEqual(self.calls(ExchangeSchedule(), 1030), [0, 1, 3, 6, 11, 20, 37, 70, 135, 264, 521, 778])

    def test_new_programs_lead_to_an_exchange_in_every_call(self):
        exchanges = ExchangeSchedule()
        self.assertEqual(self.calls(exchanges, 5, quiet=False), [0, 1, 2, 3, 4])
        self.assertEqual(self.calls(exchanges, 7), [0, 1, 3, 6])


if __name__ == "__main__":
    run_tests()
