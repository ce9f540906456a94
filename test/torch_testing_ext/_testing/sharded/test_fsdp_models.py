"""The models of common_fsdp and common_dist_composable are the ones that PyTorch's modules of these names have."""

from __future__ import annotations

import importlib
import types
from collections import ChainMap
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from kit.ranks import OneRank
from torch import nn
from torch.distributed.fsdp.wrap import enable_wrap

from torch_testing_ext.common_utils import run_tests

CPU = torch.device("cpu")


def made_by(name: str, **options: Any) -> Callable[[Any], nn.Module]:
    """Make a model of FSDP1's tests, without FSDP."""

    def make(of: Any) -> nn.Module:
        group = torch.distributed.group.WORLD
        return getattr(of, name).init(
            group, of.FSDPInitMode.NO_FSDP, of.DEVICEInitMode.DEVICE_NEVER, deterministic=True, **options
        )

    return make


@contextmanager
def wraps() -> Any:
    """In a block: `wrap` puts modules into a class that shows its options."""

    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module, **options: Any):
            super().__init__()
            self.wrapped, self.options = module, options

        def extra_repr(self) -> str:
            return str(self.options)

        def forward(self, x: torch.Tensor) -> Any:
            return self.wrapped(x)

    with enable_wrap(wrapper_cls=Wrapped):
        yield


class Recorded(nn.Module):
    """A model that records inputs: its output has those, too, in the order of its modules."""

    def __init__(self, of: Any, cast: bool):
        super().__init__()
        self.inputs: dict[nn.Module, torch.Tensor] = {}
        self.model = of.SaveForwardInputsModel(self.inputs, cast)
        self.dtype = torch.float64 if cast else torch.float32

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        output = self.model(x.to(self.dtype))
        return [output, *(self.inputs[module] for module in self.model.modules() if module in self.inputs)]


# For each: what makes it, given the module with its class, and the shape of its input. None: the model has its own.
MODELS: dict[str, tuple[Callable[[Any], nn.Module], tuple[int, ...] | None]] = {
    "NestedWrappedModule": (made_by("NestedWrappedModule"), None),
    "AlwaysWrapNestedWrappedModule": (made_by("AlwaysWrapNestedWrappedModule"), None),
    "NonUniformReqGradNWM": (made_by("NonUniformReqGradNWM"), None),
    "TransformerWithSharedParams": (made_by("TransformerWithSharedParams"), None),
    "TransformerWithSharedParams, no batch norm": (made_by("TransformerWithSharedParams", add_bn=False), None),
    "MixtureOfExperts": (made_by("MixtureOfExperts"), None),
    "NestedWrappedModuleWithDelay": (made_by("NestedWrappedModuleWithDelay"), None),
    "DummyDDP": (lambda of: of.DummyDDP(nn.Linear(3, 4)), (2, 3)),
    "MLP": (lambda of: of.MLP(5), (2, 5)),
    "MLP, all options": (lambda of: of.MLP(5, CPU, bias=False, with_buffer=True, dim_multiplier=3), (2, 5)),
    "MLPStack": (lambda of: of.MLPStack(6), (2, 6)),
    "MLPStack, sequence parallel": (lambda of: of.MLPStack(6, with_seq_parallel=True), (2, 6)),
    "DoubleLinear": (lambda of: of.DoubleLinear(4), (2, 4)),
    "DoubleLinear, one used": (lambda of: of.DoubleLinear(4, use_second_linear=False), (2, 4)),
    "SkipModule": (lambda of: of.SkipModule(), (2, 10)),
    "NestedLinear": (lambda of: of.NestedLinear(fsdp_wrap=False), (2, 10)),
    "NestedLinear, wrapped": (lambda of: of.NestedLinear(fsdp_wrap=True), (2, 10)),
    "SkipModel": (lambda of: of.SkipModel(double_nest=False), (2, 10)),
    "SkipModel, nested": (lambda of: of.SkipModel(double_nest=True), (2, 10)),
    "SaveForwardInputsModel": (lambda of: Recorded(of, cast=False), (2, 100)),
    "SaveForwardInputsModel, cast": (lambda of: Recorded(of, cast=True), (2, 100)),
    "UnitModule": (lambda of: of.UnitModule(CPU), (2, 100)),
    "CompositeModel": (lambda of: of.CompositeModel(CPU), (2, 100)),
    "UnitParamModule": (lambda of: of.UnitParamModule(CPU), (2, 100)),
    "CompositeParamModel": (lambda of: of.CompositeParamModel(CPU), (2, 100)),
    "FakeSequential": (lambda of: of.FakeSequential(nn.Linear(3, 3), nn.ReLU()), (2, 3)),
}


def modules_of(package: str) -> Any:
    """All names of these modules of a package together."""
    names = ("common_fsdp", "common_dist_composable", "common_distributed")
    return types.SimpleNamespace(**ChainMap(*(vars(importlib.import_module(f"{package}.{name}")) for name in names)))


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if k[0] != "_" and isinstance(v, bool | int | float | str | None)}


class FSDPModelsTest(OneRank):
    """In a rank: importing PyTorch's modules changes a process."""

    def test_they_are_the_same(self) -> None:
        self.join_group()
        ours, theirs = modules_of("torch_testing_ext"), modules_of("torch.testing._internal")
        for name, (make, shape) in MODELS.items():
            with self.subTest(name), wraps():
                models = []
                for of in (ours, theirs):
                    torch.manual_seed(0)  # for weights of modules that are not registered
                    models.append(make(of))
                self.compare(*models, shape)

    def compare(self, model: Any, other: Any, shape: tuple[int, ...] | None) -> None:
        described = [
            [(n, type(m).__name__, m.extra_repr(), m.training) for n, m in each.named_modules()]
            for each in (model, other)
        ]
        self.assertEqual(*described)
        for one, same in zip(model.modules(), other.modules(), strict=True):
            self.assertEqual({k: vars(one).get(k) for k in plain_attributes(same)}, plain_attributes(same))
        parameters = [[(n, p.shape, p.requires_grad) for n, p in each.named_parameters()] for each in (model, other)]
        self.assertEqual(*parameters)
        other.load_state_dict(model.state_dict())
        inputs = [each.get_input(CPU) if shape is None else (torch.ones(shape),) for each in (model, other)]
        self.assertEqual(*inputs)
        results = []
        for each, given in zip((model, other), inputs, strict=True):
            torch.manual_seed(0)  # dropout
            output = each(*given)
            if shape is None:
                loss = each.get_loss(given, output)
                each.run_backward(loss)
            else:
                loss = (output if isinstance(output, torch.Tensor) else output[0]).sum()
                loss.backward()
            results.append((output, loss, {n: p.grad for n, p in each.named_parameters()}, dict(each.named_buffers())))
        self.assertEqual(*results)


if __name__ == "__main__":
    run_tests()
