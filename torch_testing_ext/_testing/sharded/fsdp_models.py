"""The models of the FSDP tests, and the device that they use."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy, wrap
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_testing_ext._machine import accelerators, device_rules
from torch_testing_ext._machine.accelerators import set_rng_seed
from torch_testing_ext._machine.flags import ComputedNames
from torch_testing_ext._testing.bases import shared_devices
from torch_testing_ext._testing.marks import skips
from torch_testing_ext._torch import compiler_state, fsdp_parts
from torch_testing_ext.launch import environment

# --------------------------------------------------------------------------------------------------------------------
# The device that the FSDP helpers use: the machine's accelerator, or the CPU if there is none.
#
# `use_device_type` keeps a rank on the CPU, for a test that needs more devices than the machine has and allows the
# CPU. A whole world is on the CPU. A test file may set DEVICE_TYPE, DEVICE_COUNT and DISTRIBUTED_BACKEND in the mirror.
# Importing this module asks no driver; the first call does.

_chosen: str | None = None


class DEVICEInitMode(Enum):
    """The time when a test model moves to the device: before FSDP wraps it, after that, or never."""

    DEVICE_BEFORE = auto()
    DEVICE_AFTER = auto()
    DEVICE_NEVER = auto()


def use_device_type(device_type: str | None) -> None:
    """Let this process keep its models on `device_type`; None: on the machine's accelerator, if there is one."""
    global _chosen
    _chosen = device_type


def in_whole_world() -> bool:
    """Do tests in ranks run without communication?"""
    return environment.read_settings().world is not None


def _type() -> str:
    if in_whole_world():
        return "cpu"
    return _chosen or accelerators.accelerator_type() or "cpu"


# As in PyTorch, setting one does not change the others.
constants: Any = ComputedNames(
    DEVICE_TYPE=_type,
    DEVICE_COUNT=lambda: 1 if _type() == "cpu" else accelerators.device_count(),
    DISTRIBUTED_BACKEND=lambda: torch.distributed.get_default_backend_for_device(_type()),
)


def device_type() -> str:
    return str(constants.DEVICE_TYPE)


def device_count() -> int:
    """Return the number of devices of that type; 1 for the CPU."""
    return int(constants.DEVICE_COUNT)


def default_backend() -> str:
    """Return the default backend of that device: nccl, xccl, hccl, ..., gloo."""
    return str(constants.DISTRIBUTED_BACKEND)


def backend_for(world_size: int) -> str:
    """Return the backend of a group of this size on that device, which may be another if ranks share devices."""
    if constants.is_set("DISTRIBUTED_BACKEND"):
        return default_backend()
    return shared_devices.backend_of(device_type(), world_size)


def most_ranks_here() -> int:
    """Return how many ranks may use an accelerator, by what torch counts now: a test may have changed that."""
    return torch.accelerator.device_count() * device_rules.ranks_per_device()


def compute_device(rank: int) -> torch.device:
    device = torch.device(device_type())
    return device if device.type == "cpu" else torch.device(device.type, rank % device_count())


def move_if_now(module: nn.Module, mode: DEVICEInitMode, now: DEVICEInitMode) -> nn.Module:
    """Move `module` to the device if `mode` equals `now`."""
    return module.to(device_type()) if mode is now else module


def delay(milliseconds: float) -> None:
    """Keep the device busy for this time. On CUDA the stream waits and the host goes on, as after a slow kernel."""
    if milliseconds <= 0 or device_type() == "cpu":
        return
    if device_type() == "cuda":
        skips.device_sleep("cuda", int(milliseconds * skips.get_cycles_per_ms()))
    else:
        time.sleep(milliseconds / 1000)


# -- a test in a fresh rank


def run_in_group(test: Any, test_name: str, pipe: Any, fake: bool) -> None:
    """Run a test in the default group, which has no communication if it is `fake`."""
    device = compute_device(test.rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    _init_process_group(test, fake)
    # No rank may skip and exit while others still connect to it or need its answers.
    _barrier(device)
    compiler_state.reset_dynamo()
    set_rng_seed()
    test.run_test(test_name, pipe)
    compiler_state.reset_dynamo()
    _barrier(device)
    dist.destroy_process_group()


def _init_process_group(test: Any, fake: bool) -> None:
    size = int(test.world_size)
    if fake:
        from torch_testing_ext._testing.bases.fake_groups import FakeStore

        dist.init_process_group(backend="fake", world_size=size, rank=test.rank, store=FakeStore())
        return
    backend = backend_for(size)
    dist.init_process_group(backend, init_method=test.init_method, world_size=size, rank=test.rank)


def _barrier(device: torch.device) -> None:
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])


# --------------------------------------------------------------------------------------------------------------------
# The models of the FSDP2 tests: plain modules that a test shards itself.


class MLP(nn.Module):
    """Linear layers dim -> dim_multiplier * dim -> dim, each with ReLU; with `with_buffer`, adds a random buffer."""

    def __init__(
        self,
        dim: int,
        device: torch.device | None = None,
        *,
        bias: bool = True,
        with_buffer: bool = False,
        dim_multiplier: int = 4,
    ):
        """Create the layers on a device."""
        super().__init__()
        hidden = dim_multiplier * dim
        self.in_proj = nn.Linear(dim, hidden, device=device, bias=bias)
        self.out_proj = nn.Linear(hidden, dim, device=device, bias=bias)
        self.buffer: torch.Tensor | None
        if with_buffer:
            self.register_buffer("buffer", torch.randn((dim,), device=device))
        else:
            self.buffer = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out_proj(self.in_proj(x).relu()).relu()
        return out if self.buffer is None else out + self.buffer

    def reset_parameters(self) -> None:
        if self.buffer is not None:
            nn.init.normal_(self.buffer)


class MLPStack(nn.Sequential):
    """Three MLPs, the outer two of a width (3 * dim) that does not divide evenly; optionally, a LayerNorm."""

    def __init__(self, mlp_dim: int, *, with_seq_parallel: bool = False):
        layers: list[nn.Module] = [MLP(mlp_dim, dim_multiplier=3), MLP(mlp_dim), MLP(mlp_dim, dim_multiplier=3)]
        if with_seq_parallel:
            layers.append(nn.LayerNorm(mlp_dim, bias=False))
        super().__init__(*layers)
        self.with_seq_parallel = with_seq_parallel

    def parallelize(
        self, tp_mesh: DeviceMesh, dp_mesh: DeviceMesh, use_activation_checkpointing: bool, **fsdp_kwargs: Any
    ) -> MLPStack:
        """Apply tensor parallelism over `tp_mesh`, then `fully_shard` over `dp_mesh` to each MLP and to the whole."""
        from torch.distributed._composable import checkpoint  # type: ignore[attr-defined, unused-ignore]

        parallelize_module(self, device_mesh=tp_mesh, parallelize_plan=self._plan())
        for module in self:
            if isinstance(module, nn.LayerNorm):
                continue
            if use_activation_checkpointing:
                checkpoint(module)
            fully_shard(module, mesh=dp_mesh, **fsdp_kwargs)
        fully_shard(self, mesh=dp_mesh, **fsdp_kwargs)
        return self

    def _plan(self) -> dict[str, ParallelStyle]:
        # Activations between the layers stay DTensors: as plain tensors, uneven shards would lose their true sizes.
        plan: dict[str, ParallelStyle] = {}
        for index in range(3):
            plan[f"{index}.in_proj"] = ColwiseParallel(use_local_output=False)
            plan[f"{index}.out_proj"] = RowwiseParallel(use_local_output=False)
        plan["2.out_proj"] = RowwiseParallel(output_layouts=Shard(1)) if self.with_seq_parallel else RowwiseParallel()
        if self.with_seq_parallel:
            plan["3"] = SequenceParallel(sequence_dim=1)
        return plan


class DoubleLinear(nn.Module):
    """Two parallel linear layers: two outputs, or (`use_second_linear=False`) one output and an unused layer."""

    def __init__(self, dim: int, use_second_linear: bool = True):
        super().__init__()
        self.lin1 = nn.Linear(dim, dim)
        self.lin2 = nn.Linear(dim, dim)
        self.relu = nn.ReLU()
        self.use_second_linear = use_second_linear

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        first = self.relu(self.lin1(x))
        return (first, self.relu(self.lin2(x))) if self.use_second_linear else first


# --------------------------------------------------------------------------------------------------------------------
# The models of the FSDP1 tests: each creates its own input and loss, and wraps itself.
#
# `init(group, fsdp_init_mode, device_init_mode, fsdp_kwargs, deterministic, ...)` builds a model, plain or wrapped.
# With `deterministic`, two models built one after the other start with the same parameters.

BEFORE, AFTER = DEVICEInitMode.DEVICE_BEFORE, DEVICEInitMode.DEVICE_AFTER
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


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
        name = fsdp_parts.reduce_scatter_name()
        reduce_scatter = getattr(dist, name)

        def late(*args: Any, **kwargs: Any) -> Any:
            delay(self.delay_before_reduction_ms)
            return reduce_scatter(*args, **kwargs)

        with mock.patch.object(dist, name, late):
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
