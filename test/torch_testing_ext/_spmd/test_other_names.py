"""The model's own tensors under other names: ids as keys, weak references, captured gradients, shared memory."""

from __future__ import annotations

import weakref

import torch
from guarded import Scenario, play
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

STYLES = parametrize("style", ["replicate", "fully_shard"])


def first_two(model):
    return list(model.parameters())[:2]


def weak_set(model):
    found = weakref.WeakSet()
    found.data.update(weakref.ref(param, found._remove) for param in first_two(model))  # `add` compares tensors
    return found


def weak_id_keys(model):
    found = WeakIdKeyDictionary()
    for param in first_two(model):
        found[param] = 0.5
    return found


# How the step keeps two parameters from before the first call, and how it finds out whether a parameter is one of them.
KEYS = {
    "id": (lambda model: set(map(id, first_two(model))), lambda kept, param: id(param) in kept),
    "tuple": (lambda model: {(id(p), "a") for p in first_two(model)}, lambda kept, param: (id(param), "a") in kept),
    "text": (lambda model: {str(id(p)) for p in first_two(model)}, lambda kept, param: str(id(param)) in kept),
    "hex": (lambda model: {hex(id(p)): 1 for p in first_two(model)}, lambda kept, param: hex(id(param)) in kept),
    "in_text": (
        lambda model: [f"p{id(p)}.grad" for p in first_two(model)],
        lambda kept, param: f"p{id(param)}.grad" in kept,
    ),
}
WEAK = {
    "references": (
        lambda model: [*map(weakref.ref, first_two(model))],
        lambda kept, param: any(reference() is param for reference in kept),
    ),
    "set": (weak_set, lambda kept, param: any(each is param for each in kept)),
    "values": (
        lambda model: weakref.WeakValueDictionary(enumerate(first_two(model))),
        lambda kept, param: any(each is param for each in kept.values()),
    ),
    "keys_by_id": (weak_id_keys, lambda kept, param: param in kept),
}


def scaling(keep, is_kept):
    """A step that halves the gradients of those parameters that it finds in what `keep` made before the first call."""

    def of_side(side):
        kept = keep(side.model)

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            loss = (model(batch[0]) - batch[1]).pow(2).mean()
            loss.backward()
            for param in model.parameters():
                if is_kept(kept, param):
                    param.grad.mul_(0.5)
            optimizer.step()
            return loss

        return step

    return of_side


def train_once(model, optimizer):
    x = torch.ones(4, 10, device=next(model.parameters()).device)
    model(x).pow(2).mean().backward()
    optimizer.step()


CAPTURED = {
    "gradient": lambda side: side.model[0].weight.grad,
    "state": lambda side: side.optimizer.state[side.model[0].weight]["momentum_buffer"],
}
INPUTS = {
    **CAPTURED,
    "parameter": lambda side: side.model[0].weight.detach(),
    "view": lambda side: side.model[0].weight.data[:2],
    "buffer": lambda side: side.model[3].running_mean,
}


def normed():
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))


def capturing(get):
    """A step that halves a tensor of the model, its gradients or its optimizer that it captured."""

    def of_side(side):
        train_once(side.model, side.optimizer)
        captured = get(side)

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            (model(batch[0]) - batch[1]).pow(2).mean().backward()
            captured.mul_(0.5)
            optimizer.step()

        return step

    return of_side


def taking(side):
    train_once(side.model, side.optimizer)

    def step(model, optimizer, batch, more):
        optimizer.zero_grad()
        (model(batch[0]) - batch[1]).pow(2).mean().backward()
        more.mul_(0.5)
        optimizer.step()

    return step


class TestOtherNames(DTensorContinuousTestBase):
    """Against DDP on two ranks, without verification."""

    @property
    def world_size(self):
        return 2

    @STYLES
    @parametrize("name", list(KEYS))
    def test_keys_from_before_the_first_call(self, name, style):
        play(self, Scenario(scaling(*KEYS[name])), style, verify="off")

    @parametrize("name", list(WEAK))
    def test_weak_references_are_refused(self, name):
        play(self, Scenario(scaling(*WEAK[name]), refused="a weak reference to a parameter"), "replicate")

    @parametrize("name", ["data_ptr", "untyped_storage"])
    def test_addresses_are_refused(self, name):
        step = scaling(lambda model: set(), lambda kept, param: getattr(param, name)() in kept)
        play(self, Scenario(step, refused="where a tensor lies in memory"), "replicate")

    @STYLES
    @parametrize("name", list(CAPTURED))
    def test_captured_are_refused(self, name, style):
        play(self, Scenario(capturing(CAPTURED[name]), refused="a gradient or an optimizer's state"), style)

    @STYLES
    @parametrize("name", list(INPUTS))
    def test_inputs_in_their_memory_are_refused(self, name, style):
        def arguments(model, side, batch):
            return model, side.optimizer, batch, INPUTS[name](side)

        scenario = Scenario(taking, model=normed, arguments=arguments, refused="shares the memory of a parameter")
        play(self, scenario, style)

    def test_captured_inputs_are_refused(self):
        def of_side(side):
            def step(model, optimizer, batch):
                optimizer.zero_grad()
                loss = (model(batch[0]) - batch[1]).pow(2).mean() * side.own.inputs.mean()
                loss.backward()
                optimizer.step()
                return loss

            return step

        def arguments(model, side, batch):
            if not hasattr(side.own, "inputs"):
                side.own.inputs = batch[0]
            return model, side.optimizer, batch

        play(self, Scenario(of_side, arguments=arguments, refused="shares the memory of an input"), "replicate")

    def test_buffers_that_a_later_program_does_not_use(self):
        def change(i, side):
            if i == 2:
                side.model[3].track_running_stats = False

        step = scaling(lambda model: set(), lambda kept, param: False)
        play(self, Scenario(step, change, model=normed), "replicate", verify="off")


instantiate_parametrized_tests(TestOtherNames)

if __name__ == "__main__":
    run_tests()
