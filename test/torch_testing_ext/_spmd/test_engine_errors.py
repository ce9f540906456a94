"""The engine refuses what it cannot do right, on every rank, and leaves the state as it was."""

import copy
import sys
import threading
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from loops import adam, error, net, update, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torch_testing_ext._torch.tracing import roots_of_backward
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError, compile
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

STYLES = parametrize("style", ["replicate", "fully_shard"])


def meta():
    with torch.device("meta"):
        return net()


def transposed():
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6), nn.Linear(6, 3))
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    return model


def buffer_on_a_parameter():
    model = net()
    model.register_buffer("flat", model[0].weight.data.view(-1))
    return model


def on_two_dims():
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(), 1)), net()
    sharded = distribute_tensor(model[0].weight.data, mesh, [Shard(0), Replicate()])
    model[0].weight = nn.Parameter(sharded)
    return model


def sharded_by_columns():
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), net()
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, mesh, [Shard(1)]))
    return model


def of_inference_mode():
    with torch.inference_mode():
        return net()


def lazy():
    return nn.Sequential(nn.LazyLinear(3))


MODELS = {
    "meta": (meta, "meta device", ("replicate", "fully_shard")),
    "lazy": (lazy, "not initialized", ("replicate", "fully_shard")),
    "two_dims": (on_two_dims, "DeviceMesh", ("replicate", "fully_shard")),
    "columns": (sharded_by_columns, r"Shard\(dim=1\)", ("replicate", "fully_shard")),
    "inference": (of_inference_mode, "inference_mode", ("fully_shard",)),
    "ddp": (lambda: nn.parallel.DistributedDataParallel(net()), "averaged twice", ("replicate", "fully_shard")),
    "shared": (transposed, "share memory", ("fully_shard",)),
    "buffer": (buffer_on_a_parameter, "share memory", ("fully_shard",)),
}


class TestEngineErrors(DTensorContinuousTestBase):
    """Every rank raises; persistent ranks."""

    world_size = 2

    def setUp(self):
        super().setUp()
        torch.manual_seed(self.rank)

    def _batch(self, call=0):
        generator = torch.Generator().manual_seed(10 * call + self.rank)
        return torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)

    def _trained(self, style, step=update, calls=2):
        """A model and its optimizer after some calls of a step."""
        model = net()
        optimizer = adam(model)
        compiled = compile(parallel_mode=DataParallel(style))(step)
        for call in range(calls):
            compiled(model, optimizer, self._batch(call))
        return model, optimizer, compiled

    def _state(self, model, optimizer):
        params = [*model.parameters()]
        grads = [None if p.grad is None else whole(p.grad) for p in params]
        states = [[whole(t) for t in values.values()] for values in optimizer.state.values()]
        return [whole(p) for p in params], grads, states, [type(p) for p in params]

    def _raises(self, text, call, model=None, optimizer=None):
        before = None if model is None else self._state(model, optimizer)
        with self.assertRaisesRegex(SPMDError, text):
            call()
        if model is not None:
            self.assertEqual(self._state(model, optimizer), before)

    @parametrize("name", [*MODELS])
    def test_model(self, name):
        make, text, styles = MODELS[name]
        for style in styles:
            model = make()
            before = [*model.parameters()]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if name != "lazy" else None
            step = compile(parallel_mode=DataParallel(style))(update)
            self._raises(text, lambda s=step, m=model, o=optimizer: s(m, o, self._batch()))
            self.assertTrue(all(a is b for a, b in zip(before, model.parameters(), strict=True)))

    @STYLES
    def test_model_of_one_rank(self, style):
        for make in (lambda: net(6, 7 + self.rank, 3), lambda: net() if self.rank else meta(), net):
            model = make()
            optimizer = adam(model) if self.rank or make is not net else torch.optim.SGD(model.parameters(), lr=1)
            step = compile(parallel_mode=DataParallel(style))(update)
            if model[0].weight.is_meta or any(p.is_meta for p in model.parameters()):
                self._raises("meta", lambda s=step, m=model, o=optimizer: s(m, o, self._batch()))
            else:
                self._raises(
                    "differ in their|Rank 0 refused",
                    lambda s=step, m=model, o=optimizer: s(m, o, self._batch()),
                    model,
                    optimizer,
                )

    @STYLES
    def test_layer_of_one_rank_at_a_later_call(self, style):
        for calls in (2, 12):
            model, optimizer, step = self._trained(style, calls=calls)
            if self.rank:
                model.append(nn.Linear(3, 3))
            self._raises("rank 1 has 6", lambda s=step, m=model, o=optimizer: s(m, o, self._batch(1)))

    @STYLES
    def test_without_grad(self, style):
        model, optimizer, step = self._trained(style)
        evaluate = compile(parallel_mode=DataParallel(style))(lambda model, batch: error(model, batch))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                evaluate(model, self._batch())
                with self.assertRaisesRegex(SPMDError, "under no_grad or inference_mode"):
                    step(model, optimizer, self._batch())
        step(model, optimizer, self._batch())

    @STYLES
    def test_other_thread_and_itself(self, style):
        raised = []

        def in_thread(*args):
            try:
                step(*args)
            except SPMDError as error:
                raised.append(str(error))

        def nested(*args):
            thread = threading.Thread(target=in_thread, args=args)
            thread.start()
            thread.join()
            in_thread(*args)
            return update(*args)

        _, _, step = self._trained(style, lambda *args: nested(*args), calls=0)
        model = net()
        step(model, adam(model), self._batch())
        self.assertEqual(len(raised), 2)
        self.assertIn("another thread", raised[0])
        self.assertIn("calls itself", raised[1])

    @STYLES
    def test_one_rank_raises(self, style):
        flags = {"raise": False}

        def step(model, optimizer, batch):
            if flags["raise"] and self.rank:
                raise KeyError("mine")
            return update(model, optimizer, batch)

        for calls in (2, 12):
            flags["raise"] = False
            model, optimizer, compiled = self._trained(style, step, calls)
            flags["raise"] = True
            with self.assertRaisesRegex(*((KeyError, "mine") if self.rank else (SPMDError, "error on rank 1"))):
                compiled(model, optimizer, self._batch())
            flags["raise"] = False
            compiled(model, optimizer, self._batch())

    @STYLES
    def test_numbers_of_backwards(self, style):
        backwards = [1, 1]

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            for _ in range(backwards[self.rank]):
                error(model, batch).backward()
            optimizer.step()

        for calls in (2, 12):
            backwards[:] = [1, 1]
            model, optimizer, compiled = self._trained(style, step, calls)
            backwards[:] = [1, 0]
            with self.assertRaisesRegex(SPMDError, r"ran on the ranks \[0\]"):
                compiled(model, optimizer, self._batch())
            backwards[:] = [1, 1]
            model, optimizer, compiled = self._trained(style, step, calls)
            backwards[:] = [2, 1]
            with self.assertRaisesRegex(SPMDError, "different numbers of calls or backwards"):
                compiled(model, optimizer, self._batch())
                compiled(model, optimizer, self._batch())

    @STYLES
    def test_divergence(self, style):
        def by_hand(model, optimizer, batch):
            gradients = torch.autograd.grad(error(model, batch), [*model.parameters()])
            with torch.no_grad():
                for param, gradient in zip(model.parameters(), gradients, strict=True):
                    param -= 0.1 * gradient
            error(model, batch).backward()

        def noisy(model, optimizer, batch):
            optimizer.zero_grad()
            error(model, batch).backward()
            next(model.parameters()).grad[0, 0] *= 1 - 2 * self.rank
            optimizer.step()

        def without_backward(model, optimizer, batch):
            optimizer.zero_grad()
            params = [*model.parameters()]
            for param, gradient in zip(params, torch.autograd.grad(error(model, batch), params), strict=True):
                param.grad = gradient
            optimizer.step()

        for step in (by_hand, noisy, without_backward):
            model, optimizer, compiled = self._trained(style, step, 1)
            self._raises(
                "parameters of rank 1 differ",
                lambda c=compiled, m=model, o=optimizer: c(m, o, self._batch()),
                model,
                optimizer,
            )

    @STYLES
    def test_divergence_at_a_later_call(self, style):
        model, optimizer, compiled = self._trained(style, calls=12)
        first = next(model.parameters())
        (first if style == "replicate" else first.to_local()).data.view(-1)[0] += self.rank
        if style == "replicate":
            with self.assertRaisesRegex(SPMDError, "parameters of rank 1 differ"):
                compiled(model, optimizer, self._batch())
        else:  # rows are never compared: each is that of one rank
            compiled(model, optimizer, self._batch())

    def test_update_of_one_rank(self):
        def step(model, optimizer, batch):
            optimizer.zero_grad()
            error(model, batch).backward()
            if self.rank or steps["all"]:
                optimizer.step()

        steps = {"all": True}
        for calls in (1, 12):  # the first calls gather what is updated; later ones do only if something reads it
            steps["all"] = True
            model, optimizer, compiled = self._trained("fully_shard", step, calls)
            steps["all"] = False
            with self.assertRaisesRegex(SPMDError, "updated rows of 0 parameters on rank 0, and of 4 on rank 1"):
                compiled(model, optimizer, self._batch())

    @STYLES
    def test_hidden_model(self, style):
        model, known = net(), net(3, 3)
        hidden, optimizer = [[[[[[model]]]]]], adam(known)

        def through(batch):
            return known(hidden[0][0][0][0][0][0](batch[0])).sum().backward()

        def alone(batch):
            return hidden[0][0][0][0][0][0](batch[0]).sum().backward()

        self.assertIsNotNone(optimizer)
        for step in (through, alone):
            with self.assertRaisesRegex(SPMDError, "no module or optimizer holds"):
                compile(parallel_mode=DataParallel(style))(step)(self._batch())

    def test_temporary_parameters_are_the_rank_s_own(self):
        def step(model, optimizer, batch):
            noise = nn.Parameter(torch.zeros_like(batch[0]))
            inner = torch.optim.SGD([noise], lr=0.1)
            (model(batch[0] + noise) - batch[1]).pow(2).mean().backward()
            inner.step()
            return update(model, optimizer, (batch[0] + noise.detach(), batch[1]))

        self._trained("replicate", step, 3)

        def keeping(model, optimizer, batch):
            loss = error(model, batch) * nn.Parameter(torch.ones(()))
            loss.backward()
            return loss

        with self.assertRaisesRegex(SPMDError, r"return loss.detach\(\)"):
            self._trained("replicate", keeping)

    def test_teacher_of_inference_mode(self):
        teacher = of_inference_mode()

        def step(model, optimizer, batch):
            with torch.no_grad():
                target = teacher(batch[0])
            return update(model, optimizer, (batch[0], target))

        self._trained("replicate", step)

    def test_hook_on_a_dtensor(self):
        model, optimizer, step = self._trained("fully_shard")
        handle = next(model.parameters()).register_hook(lambda grad: grad * 0)
        self._raises("gradient hook", lambda: step(model, optimizer, self._batch()), model, optimizer)
        handle.remove()
        step(model, optimizer, self._batch())

    def test_backward_after_the_call(self):
        for mode in (DataParallel("fully_shard"), DataParallel(between="dtensor")):
            model, step = net(), compile(parallel_mode=mode)(error)
            loss = step(model, self._batch())
            self._raises("after the step had returned", loss.backward)

        model = net()
        reference = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        optimizer, other = adam(model), adam(reference)
        step = compile()(error)
        for call in range(3):
            for loss_of, optimizer_of, m in ((step, optimizer, model), (error, other, reference)):
                loss = loss_of(m, self._batch(call))
                optimizer_of.zero_grad()
                loss.backward()
                optimizer_of.step()
        self.assertEqual([*map(whole, model.parameters())], [*map(whole, reference.parameters())])

    def test_update_after_the_call(self):
        """An optimizer that no step has had holds parameters that are empty between calls."""
        model = net()
        step = compile(parallel_mode=DataParallel("fully_shard"))(lambda model, batch: error(model, batch).backward())
        before = adam(model)
        step(model, self._batch())
        with self.assertRaisesRegex(SPMDError, "steps outside of the compiled step"):
            before.step()
        values = [*map(whole, model.parameters())]
        adam(model).step()  # on DTensors
        for value, param in zip(values, model.parameters(), strict=True):
            self.assertNotEqual(value, whole(param))

    def test_dtensors_that_are_held(self):
        """The step would clip, or update, what the model does not use in a call."""

        class Wrapper(torch.optim.Optimizer):
            def __init__(self, params):
                params = [*params]
                self.inner = torch.optim.SGD(params, lr=0.1)
                super().__init__(params, {})

            def step(self):
                self.inner.step()

        for mode in (DataParallel("fully_shard"), DataParallel(between="dtensor")):
            model = net()
            compile(parallel_mode=mode)(error)(model, self._batch())
            params, optimizer = [*model.parameters()], Wrapper(model.parameters())
            clip = compile(parallel_mode=mode)(lambda *_, params=params: nn.utils.clip_grad_norm_(params, 1))
            self._raises("A list, .* holds the DTensor of parameter 0.weight", lambda c=clip, m=model: c(m))
            step = compile(parallel_mode=mode)(update)
            self._raises(
                "SGD, .* updates the DTensor of parameter 0.weight",
                lambda s=step, m=model, o=optimizer: s(m, o, self._batch()),
            )

    def test_other_style(self):
        for first, second in (("replicate", "fully_shard"), ("fully_shard", "replicate")):
            model, optimizer, _ = self._trained(first)
            step = compile(parallel_mode=DataParallel(second))(update)
            with self.assertRaisesRegex(SPMDError, "by another compiled step"):
                step(model, optimizer, self._batch())
            compile(parallel_mode=DataParallel("default"))(update)(model, optimizer, self._batch())

    def test_options(self):
        for make, text in (
            (lambda: compile(backend="jit"), "Unknown backend"),
            (lambda: compile(backend="engine", gm_transformation=lambda graph: graph), "no graph"),
            (lambda: DataParallel(between="whole"), "Unknown between"),
            (lambda: compile()(update).report(), "has not been called"),
        ):
            with self.assertRaisesRegex(SPMDError, text):
                make()
        self.assertEqual(type(compile(gm_transformation=lambda graph: graph)(update)).__name__, "CaptureStep")


instantiate_parametrized_tests(TestEngineErrors)


class TestRootsOfBackward(unittest.TestCase):
    """Asked for at its end, by whichever thread that is: on a GPU, one of the engine's."""

    def test_from_any_thread(self):
        leaf, found = torch.ones(2, requires_grad=True), []

        def ask(_):
            found.append(roots_of_backward())
            thread = threading.Thread(target=lambda: found.append(roots_of_backward()))
            thread.start()
            thread.join()

        leaf.register_hook(ask)
        first, second = leaf * 2, leaf * 3
        torch.autograd.backward([first, second], [torch.ones(2)] * 2)
        self.assertEqual([[id(root) for root in roots] for roots in found], [[id(first), id(second)]] * 2)
        self.assertEqual(roots_of_backward(), [])


if __name__ == "__main__":
    run_tests()
