"""The models of the FSDP1 tests: each creates its own input and loss, and wraps itself.

`init(group, fsdp_init_mode, device_init_mode, fsdp_kwargs, deterministic, ...)` builds a model, plain or wrapped. With
`deterministic`, two models built one after the other start with the same parameters.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy, wrap

from torch_testing_ext._torch import fsdp_parts

from .fsdp_devices import DEVICEInitMode, delay, device_type, move_if_now

BEFORE, AFTER = DEVICEInitMode.DEVICE_BEFORE, DEVICEInitMode.DEVICE_AFTER
HYBRID = fsdp_parts.hybrid_strategies()


class FSDPInitMode(Enum):
    """The wrapping of a model by `init`. NO_FSDP: none. RECURSIVE: some or all modules, depending on the model."""

    NO_FSDP = auto()
    RECURSIVE = auto()


class FSDPTestModel(nn.Module, ABC):
    """The interface of a model for `_train_for_several_steps`."""

    @abstractmethod
    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return a batch, the same at each call, different on each rank."""

    @abstractmethod
    def get_loss(self, input: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def run_backward(self, loss: torch.Tensor) -> None: ...

    @staticmethod
    @abstractmethod
    def init(*args: Any, **kwargs: Any) -> nn.Module: ...


class DummyProcessGroup:
    """A rank and a size without communication: an all-reduce completes at once and changes nothing."""

    def __init__(self, rank: int, size: int):
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        done: torch.futures.Future[int] = torch.futures.Future()
        done.set_result(1)
        return mock.Mock(get_future=mock.Mock(return_value=done))


class DummyDDP(nn.Module):
    """Gives a plain model the `.module` of a data-parallel wrapper."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class TransformerWithSharedParams(FSDPTestModel):
    """A small transformer whose output projection shares the embedding's weight; one of its buffers is integral."""

    vocab_bias: torch.Tensor
    long_buffer: torch.Tensor

    def __init__(self, group: dist.ProcessGroup, device_init_mode: DEVICEInitMode, add_bn: bool, deterministic: bool):
        """Create the layers; those of all ranks are equal if `deterministic`."""
        super().__init__()
        self.rank = group.rank()
        self.world_size = group.size()
        if deterministic:
            torch.manual_seed(0)
        vocabulary, width = 23, 16
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(
            d_model=width, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=8, dropout=0.1
        )
        self.output_proj = nn.Linear(width, vocabulary)
        self.output_proj.weight = self.embed_tokens.weight
        self.register_buffer("vocab_bias", torch.ones(width))
        self.register_buffer("long_buffer", torch.zeros(width, dtype=torch.long))
        self.bs = 2
        self.bn = nn.BatchNorm1d(self.bs) if add_bn else nn.Identity()
        move_if_now(self, device_init_mode, BEFORE)
        if deterministic:
            self.eval()

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        # Dropout is the same each time.
        torch.manual_seed(1 + self.rank)
        source = torch.arange(12, device=device).view(6, self.bs)
        target = torch.arange(4 * self.bs, device=device).view(4, self.bs)
        return source, target

    def forward(self, src_ids: torch.Tensor, tgt_ids: torch.Tensor) -> Any:
        source = self.embed_tokens(src_ids)
        source = source + self.vocab_bias + self.long_buffer.type_as(source)
        target = self.bn(self.embed_tokens(tgt_ids))
        return self.output_proj(self.transformer(source, target))

    def get_loss(self, input: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        target = input[1]
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]

    @staticmethod
    def init(
        group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup],
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
        add_bn: bool = True,
    ) -> nn.Module:
        """Build the model. RECURSIVE wraps the whole and, inside it, the modules that the policy chooses.

        The policy is `fsdp_kwargs["auto_wrap_policy"]`, by default encoder and decoder layers. A pair of groups is for
        hybrid sharding: the model takes rank and size from the first.
        """
        _check_mode(fsdp_init_mode)
        first_group = group[0] if isinstance(group, tuple) else group
        model = TransformerWithSharedParams(first_group, device_init_mode, add_bn, deterministic)
        if fsdp_init_mode is FSDPInitMode.NO_FSDP:
            return model
        options = dict(fsdp_kwargs or {})
        layers = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})
        policy = options.pop("auto_wrap_policy", layers)
        # For hybrid sharding over one group, FSDP creates the groups within and between machines itself.
        makes_own_groups = options.get("sharding_strategy") in HYBRID and not isinstance(group, tuple)
        wrapped = FSDP(model, None if makes_own_groups else group, auto_wrap_policy=policy, **options)
        return move_if_now(wrapped, device_init_mode, AFTER)

    def get_ignored_modules(self) -> list[nn.Module]:
        return [self.transformer]


class NestedWrappedModule(FSDPTestModel):
    """Four stages of linear layers; wrapped modules are next to, inside and around unwrapped ones.

    `init` never wraps the model as a whole; the test may do so.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wrap_fsdp: bool,
        device_init_mode: DEVICEInitMode,
        deterministic: bool,
        **fsdp_kwargs: Any,
    ):
        """Create the stages, wrapped in FSDP if wanted."""
        super().__init__()
        self.rank = group.rank()
        self.world_size = group.size()
        if deterministic:
            torch.manual_seed(0)

        def linear(width_in: int, width_out: int) -> nn.Module:
            return move_if_now(nn.Linear(width_in, width_out), device_init_mode, BEFORE)

        def wrapped(module: nn.Module) -> nn.Module:
            return FSDP(module, group, **fsdp_kwargs) if wrap_fsdp else module

        self.module = nn.Sequential(*self._stages(linear, wrapped))

    @staticmethod
    def _stages(linear: Callable[[int, int], nn.Module], wrapped: Callable[[nn.Module], nn.Module]) -> list[nn.Module]:
        return [
            linear(8, 4),
            wrapped(nn.Sequential(wrapped(linear(4, 16)), linear(16, 16))),
            wrapped(linear(16, 4)),
            linear(4, 8),
        ]

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1 + self.rank)
        return (torch.rand(4, 8, device=device),)

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)

    def get_loss(self, input: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.sum()

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]

    @staticmethod
    def init(
        group: dist.ProcessGroup,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
    ) -> nn.Module:
        return _init_nested(NestedWrappedModule, group, fsdp_init_mode, device_init_mode, fsdp_kwargs, deterministic)


class AlwaysWrapNestedWrappedModule(NestedWrappedModule):
    """A NestedWrappedModule for which RECURSIVE wraps every module and the model as a whole."""

    @staticmethod
    def init(
        group: dist.ProcessGroup,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
    ) -> nn.Module:
        _check_mode(fsdp_init_mode)
        model = NestedWrappedModule.init(group, FSDPInitMode.NO_FSDP, device_init_mode, deterministic=deterministic)
        if fsdp_init_mode is FSDPInitMode.NO_FSDP:
            return model
        wrapped = FSDP(model, auto_wrap_policy=always_wrap_policy, **(fsdp_kwargs or {}))
        return move_if_now(wrapped, device_init_mode, AFTER)


class NonUniformReqGradNWM(NestedWrappedModule):
    """A NestedWrappedModule in which only the last linear layer trains.

    The last two layers share one wrapper, which puts all elements of the last one on one rank. So with original
    parameters, some ranks hold no trainable element.
    """

    @staticmethod
    def _stages(linear: Callable[[int, int], nn.Module], wrapped: Callable[[nn.Module], nn.Module]) -> list[nn.Module]:
        return [
            linear(8, 4),
            wrapped(nn.Sequential(wrapped(linear(4, 16)), linear(16, 16))),
            wrapped(nn.Sequential(linear(16, 4), linear(4, 8))),
        ]

    @staticmethod
    def _set_nonuniform_req_grad(model: nn.Module, req_grad_mask: str | re.Pattern[str]) -> None:
        for name, parameter in model.named_parameters():
            if not re.match(req_grad_mask, name):
                parameter.requires_grad_(False)

    @staticmethod
    def init(
        group: dist.ProcessGroup,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
    ) -> nn.Module:
        model = _init_nested(NonUniformReqGradNWM, group, fsdp_init_mode, device_init_mode, fsdp_kwargs, deterministic)
        # "module.2.1.", with or without the level that FSDP inserts between the two numbers.
        NonUniformReqGradNWM._set_nonuniform_req_grad(model, re.compile(r"module\.2.*\.1.*"))
        return model


class ModuleWithDelay(FSDPTestModel):
    """Wraps another test model with a delay after the loss, before gradients are reduced, or both.

    The delays reveal work that runs too early. On the CPU, where nothing overlaps, there are none.
    """

    def __init__(self, module: FSDPTestModel, delay_after_loss_ms: int, delay_before_reduction_ms: int):
        super().__init__()
        self.module = module
        self.delay_after_loss_ms = delay_after_loss_ms
        self.delay_before_reduction_ms = delay_before_reduction_ms

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        return self.module.get_input(device)

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)

    def get_loss(self, input: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        loss = self.module.get_loss(input, output)
        delay(self.delay_after_loss_ms)
        return loss

    def run_backward(self, loss: torch.Tensor) -> None:
        with fsdp_parts.reduction_preceded_by(lambda: delay(self.delay_before_reduction_ms)):
            self.module.run_backward(loss)

    @staticmethod
    def init(
        module_class: type[FSDPTestModel],
        *model_args: Any,
        delay_after_loss_ms: int,
        delay_before_reduction_ms: int,
        **model_kwargs: Any,
    ) -> nn.Module:
        model: Any = module_class.init(*model_args, **model_kwargs)
        return ModuleWithDelay(model, delay_after_loss_ms, delay_before_reduction_ms)


class NestedWrappedModuleWithDelay(ModuleWithDelay):
    """A NestedWrappedModule in a ModuleWithDelay."""

    @staticmethod
    def init(  # type: ignore[override]
        group: dist.ProcessGroup,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode = DEVICEInitMode.DEVICE_AFTER,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
        delay_after_loss_ms: int = 0,
        delay_before_reduction_ms: int = 0,
    ) -> nn.Module:
        model: Any = NestedWrappedModule.init(group, fsdp_init_mode, device_init_mode, fsdp_kwargs, deterministic)
        return ModuleWithDelay(model, delay_after_loss_ms, delay_before_reduction_ms)


class MixtureOfExperts(NestedWrappedModule):
    """A shared layer, then an expert layer that differs from rank to rank and whose gradients are not reduced.

    Wrapped, the expert has a group of one rank. Unwrapped, `run_backward` averages the other gradients itself.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wrap_fsdp: bool,
        device_init_mode: DEVICEInitMode,
        delay_before_free_ms: int,
        deterministic: bool,
        **fsdp_kwargs: Any,
    ):
        """Create the layers; the expert has other parameters in each rank."""
        super().__init__(group, False, device_init_mode, deterministic)
        self.group = group
        self.wrap_fsdp = wrap_fsdp
        self.delay_before_free_ms = delay_before_free_ms
        self.move_to_device = device_init_mode is BEFORE

        def linear(width_in: int, width_out: int) -> nn.Module:
            return move_if_now(nn.Linear(width_in, width_out), device_init_mode, BEFORE)

        if deterministic:
            torch.manual_seed(42 + self.rank)
        expert = linear(23, 12)
        self.num_expert_params = sum(parameter.numel() for parameter in expert.parameters())
        for parameter in expert.parameters():
            parameter.expert = True  # type: ignore[attr-defined]
        if deterministic:
            torch.manual_seed(0)
        shared = linear(12, 23)
        if wrap_fsdp:
            expert = FSDP(expert, dist.new_group([group.rank()]), **fsdp_kwargs)  # type: ignore[arg-type, unused-ignore]
            shared = FSDP(shared, group, **fsdp_kwargs)
        self.module = nn.Sequential(linear(8, 12), shared, expert, linear(12, 8))

    def forward(self, x: torch.Tensor) -> Any:
        delayed: AbstractContextManager[None] = nullcontext()
        if self.delay_before_free_ms > 0 and self.wrap_fsdp:
            delayed = fsdp_parts.reshard_preceded_by(lambda: delay(self.delay_before_free_ms))
        with delayed:
            return self.module(x)

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        if self.wrap_fsdp:
            return
        for parameter in self.parameters():
            if parameter.grad is not None and not hasattr(parameter, "expert"):
                parameter.grad.div_(self.world_size)
                dist.all_reduce(parameter.grad, group=self.group)

    @staticmethod
    def init(
        group: dist.ProcessGroup,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
        delay_before_free_ms: int = 0,
    ) -> nn.Module:
        delay = {"delay_before_free_ms": delay_before_free_ms}
        return _init_nested(
            MixtureOfExperts, group, fsdp_init_mode, device_init_mode, fsdp_kwargs, deterministic, **delay
        )


class SkipModule(nn.Module):
    """A layer that a test excludes from its auto wrap policy."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.lin(x)


class NestedLinear(nn.Module):
    """One linear layer; with `fsdp_wrap`, the enclosing `enable_wrap` wraps it."""

    def __init__(self, fsdp_wrap: bool):
        super().__init__()
        linear = nn.Linear(10, 10, bias=False).to(device_type())
        self.nested_linear = wrap(linear) if fsdp_wrap else linear

    def forward(self, x: torch.Tensor) -> Any:
        return self.nested_linear(x)


class SkipModel(nn.Module):
    """A plain layer, one to skip, and one that the enclosing `enable_wrap` wraps (twice with `double_nest`)."""

    def __init__(self, double_nest: bool):
        super().__init__()
        kind = device_type()
        self.linear = nn.Linear(10, 10, bias=False).to(kind)
        self.linear_skip = SkipModule().to(kind)
        self.nested_linear = wrap(NestedLinear(fsdp_wrap=double_nest), device_id=kind)

    def forward(self, x: torch.Tensor) -> Any:
        return self.nested_linear(self.linear_skip(self.linear(x)))


def _check_mode(mode: FSDPInitMode) -> None:
    if mode not in (FSDPInitMode.NO_FSDP, FSDPInitMode.RECURSIVE):
        raise ValueError(f"fsdp_init_mode must be one of {[str(m) for m in FSDPInitMode]}, not {mode!r}")


def _init_nested(
    model_class: type[NestedWrappedModule],
    group: dist.ProcessGroup,
    fsdp_init_mode: FSDPInitMode,
    device_init_mode: DEVICEInitMode,
    fsdp_kwargs: dict[str, Any] | None,
    deterministic: bool,
    **others: Any,
) -> nn.Module:
    """Create a model of this class, wrapped or not, and place it on its device."""
    _check_mode(fsdp_init_mode)
    others["deterministic"] = deterministic
    if fsdp_init_mode is FSDPInitMode.NO_FSDP:
        return model_class(group, wrap_fsdp=False, device_init_mode=device_init_mode, **others)
    model = model_class(group, wrap_fsdp=True, device_init_mode=device_init_mode, **others, **(fsdp_kwargs or {}))
    return move_if_now(model, device_init_mode, AFTER)
