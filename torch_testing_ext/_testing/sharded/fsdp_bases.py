"""The bases of FSDP tests, what they compare, and patches of FSDP2."""

import contextlib
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_testing_ext._machine import accelerators
from torch_testing_ext._testing.bases.continuous import UNSET, MultiProcContinuousTest
from torch_testing_ext._testing.bases.distributed_bases import run_subtests
from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase
from torch_testing_ext._testing.bases.multi_threaded import MultiThreadedTestCase
from torch_testing_ext._testing.bases.rank_accounts import account_for
from torch_testing_ext._testing.bases.rank_handles import account_behind
from torch_testing_ext._testing.bases.ranked_test_case import checked_world_size
from torch_testing_ext._testing.helpers.pytorch_helpers import FILE_SCHEMA
from torch_testing_ext._testing.marks.needs import TEST_SKIPS, Skipped, TestSkip, most_needed, needs_of, too_few_devices
from torch_testing_ext._torch import compiler_state, fsdp_parts

from . import fsdp_models as fsdp_models
from .fsdp_models import DEVICEInitMode, FSDPInitMode, FSDPTestModel

# --------------------------------------------------------------------------------------------------------------------
# Helpers to read, move and compare the parameters and state dicts of FSDP1 and FSDP2 models.

State = dict[str, torch.Tensor]


def get_full_params(model: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
    """Copy the unsharded parameters of `model`; with `recurse=False`, without those of its submodules."""
    with FSDP.summon_full_params(model, recurse=recurse):
        return deepcopy(list(model.parameters()))


@torch.no_grad()
def _zero_model(model: nn.Module, zero_buffers: bool = False, summon_full: bool = True) -> None:
    """Set all parameters (and buffers) of `model` to zero in place."""
    with FSDP.summon_full_params(model) if summon_full else nullcontext():
        for parameter in model.parameters():
            parameter.zero_()
        for buffer in model.buffers() if zero_buffers else ():
            buffer.zero_()


def _get_state_dict(model: nn.Module, cpu_offload: bool = False, half: bool = False) -> State:
    if not cpu_offload:
        model = model.to(fsdp_models.device_type())
    if half:
        model.half()
    return model.state_dict()


def _broadcast_state_dict(rank: int, state_dict: State) -> State:
    """Broadcast rank 0's state dict to every rank's device, through the CPU, where parts of it may be already."""
    box: list[State | None] = [None]
    if rank == 0:
        for name, value in state_dict.items():
            state_dict[name] = value.cpu()
        box = [state_dict]
    dist.broadcast_object_list(box)
    received = box[0] or {}
    return {name: value.to(fsdp_models.device_type()) for name, value in received.items()}


def _assert_module_states(
    model: nn.Module, process_group: dist.ProcessGroup, assert_fn: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    """Call `assert_fn` on rank 0's and each other rank's value of every parameter and buffer of `model`."""
    mine = [(name, p.detach().cpu()) for name, p in model.named_parameters()]
    mine += [(name, b.detach().cpu()) for name, b in model.named_buffers()]
    everyones: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyones, mine, group=process_group)
    first, *others = everyones
    for other in others:
        for (_, expected), (_, actual) in zip(first, other, strict=True):
            assert_fn(expected, actual)


def check_sharded_parity(
    cls: Any, replicated_module: nn.Module, sharded_module: nn.Module, prefixes_to_ignore: tuple[str, ...] = ()
) -> None:
    """Assert that this rank's shards of parameters and gradients equal shards of the replicated module's.

    `cls` is the test case. `prefixes_to_ignore` are removed from the sharded module's parameter names first.
    """
    pairs = zip(replicated_module.named_parameters(), sharded_module.named_parameters(), strict=True)
    for (name, replicated), (sharded_name, sharded) in pairs:
        for prefix in prefixes_to_ignore:
            sharded_name = sharded_name.replace(prefix, "")
        cls.assertEqual(name, sharded_name)
        _check_shard(cls, f"parameter {name}", replicated, sharded, like=sharded)
        if replicated.grad is None:
            cls.assertIsNone(sharded.grad, f"{name} has a gradient only where it is sharded")
            continue
        cls.assertIsNotNone(sharded.grad, f"{name} has a gradient only where it is replicated")
        _check_shard(cls, f"gradient of {name}", replicated.grad, sharded.grad, like=sharded)


def _check_shard(cls: Any, what: str, whole: torch.Tensor, shard: Any, *, like: Any) -> None:
    cls.assertIsInstance(shard, DTensor, what)
    if tuple(like.placements) == (Shard(0), Shard(0)):
        raise AssertionError(
            f"{what} is (Shard(0), Shard(0)), which FSDP and distribute_tensor shard in different orders: "
            "compare its full_tensor() instead"
        )
    expected = distribute_tensor(whole, like.device_mesh, like.placements)
    cls.assertEqual(shard.to_local(), expected.to_local(), msg=what)


def subtest_name(test_name_mapping: dict[str, str], *args: Any) -> str:
    """Join the mapped names of `args` by "_"; "none" for None."""
    return "_".join("none" if arg is None else test_name_mapping[str(arg)] for arg in args)


def _move_to_device(model: nn.Module, move_to_device: bool) -> nn.Module:
    return model.to(fsdp_models.device_type()) if move_to_device else model


def _maybe_wrap_fsdp(model: nn.Module, wrap_fsdp: bool, *args: Any, **kwargs: Any) -> nn.Module:
    return FSDP(model, *args, **kwargs) if wrap_fsdp else model


# --------------------------------------------------------------------------------------------------------------------
# FSDPTestMixin, which trains a model under FSDP and under a reference and compares the results.


class FSDPTestMixin:
    """Trains a model under FSDP and under a reference, and compares; for any test base with a process group."""

    rank: int
    process_group: Any

    @classmethod
    def _run(cls: Any, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
        """Run a test in a group, also on the CPU, if a MultiProcessTestCase derives from this mixin."""
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        if (skip := self._skip_in_rank()) is not None:
            sys.exit(account_for(account_behind(pipe), Skipped(skip)))
        fsdp_models.run_in_group(self, test_name, pipe, bool(kwargs.get("fake_pg")))

    def _skip_in_rank(self: Any) -> TestSkip | None:
        """Decide in a fresh rank whether the devices are too few."""
        size = int(self.world_size)
        are_enough = fsdp_models.device_type() == "cpu" or fsdp_models.most_ranks_here() >= size
        return None if are_enough else too_few_devices(size)

    def run_subtests(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_subtests(self, *args, **kwargs)

    def _check_cpu_offload(self: Any, fsdp_model: Any, cpu_offload: CPUOffload) -> None:
        self.assertEqual(cpu_offload, fsdp_model.cpu_offload)

    def _check_backward_prefetch(self: Any, fsdp_model: Any, backward_prefetch: BackwardPrefetch) -> None:
        self.assertEqual(backward_prefetch, fsdp_model.backward_prefetch)

    def _check_forward_prefetch(self: Any, fsdp_model: Any, forward_prefetch: bool) -> None:
        self.assertEqual(forward_prefetch, fsdp_model.forward_prefetch)

    def _train_for_several_steps(
        self: Any,
        model: nn.Module,
        num_steps: int,
        autocast: bool,
        lr: float = 0.01,
        fsdp_cpu_offload: CPUOffload | None = None,
        save_model: bool = False,
        mixed_precision: MixedPrecision | None = None,
        enable_sharded_grad_scaler: bool = False,
        use_pure_fp16: bool = False,
        sharded_grad_scaler_kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Train `model.module`, a FSDPTestModel inside some wrapper, and return the last loss, detached.

        Assert that the loss has the dtype of the requested precision, and that offloaded parameters are on the CPU
        after each forward and backward. With `save_model`, save the model, zero it and load it again after each step.
        """
        module: Any = model.module
        is_fsdp = isinstance(model, FSDP)
        offloaded = is_fsdp and fsdp_cpu_offload is not None and fsdp_cpu_offload.offload_params
        loss_device = next(model.parameters()).device
        loss_dtype = _expected_loss_dtype(is_fsdp, mixed_precision, use_pure_fp16)
        kind = fsdp_models.device_type()
        scaler_options = {"device": kind, **(sharded_grad_scaler_kwargs or {})}
        scaler = ShardedGradScaler(enabled=enable_sharded_grad_scaler, **scaler_options)
        # Adam would hide a gradient that is wrong by a factor.
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        for _ in range(num_steps):
            optimizer.zero_grad()
            with torch.amp.autocast(kind, enabled=autocast):
                batch = module.get_input(torch.device(kind))
                # With mixed precision, FSDP casts inputs itself; the reference does not.
                if use_pure_fp16 or (mixed_precision and not is_fsdp):
                    batch = tuple(tensor.half() for tensor in batch)
                output = model(*batch)
                if offloaded and not fsdp_parts.keeps_parameters_after_forward(model):
                    self._assert_on_cpu(model, "after the forward")
                loss = module.get_loss(batch, output).to(loss_device)
            loss = scaler.scale(loss)
            self.assertEqual(loss.dtype, loss_dtype, msg="dtype of the loss")
            module.run_backward(loss)
            if offloaded:
                self._assert_on_cpu(model, "after the backward")
            scaler.step(optimizer)
            scaler.update()
            if save_model:
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                _zero_model(model)
                model.load_state_dict(saved)
        if is_fsdp:
            self.assertTrue(fsdp_parts.is_idle(model), "FSDP believes that it is still training")
        last: torch.Tensor = loss.detach()
        return last

    def _test_fsdp_parity(
        self: Any,
        model_class: type[FSDPTestModel],
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        ref_init_fn: Callable[[nn.Module], nn.Module] | None = None,
        num_iters: int = 2,
        save_model: bool = True,
        cpu_offload: CPUOffload = CPUOffload(),  # noqa: B008 (never written to)
        backward_prefetch: BackwardPrefetch | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        mixed_precision: MixedPrecision | None = None,
        forward_prefetch: bool = False,
        use_orig_params: bool = False,
        enable_sharded_grad_scaler: bool = False,
        use_pure_fp16: bool = False,
        init_kwargs: dict[str, Any] | None = None,
        sharded_grad_scaler_kwargs: dict[str, Any] | None = None,
        **fsdp_kwargs: Any,
    ) -> None:
        """Assert that training under FSDP results in the same loss and parameters as a reference.

        The reference is DDP, or the result of `ref_init_fn` for the plain model. Parameters are compared in full
        precision only: in lower precision, the two optimizers use different dtypes.
        """
        if fsdp_init_mode is FSDPInitMode.NO_FSDP:
            raise AssertionError("fsdp_init_mode is NO_FSDP: there is nothing to compare with the reference")
        offloads = cpu_offload is not None and cpu_offload.offload_params
        # FSDP refuses offloaded parameters that were moved away from the CPU.
        must_fail = offloads and device_init_mode is DEVICEInitMode.DEVICE_AFTER
        training = {
            "num_steps": num_iters,
            "lr": 1e-2,
            "fsdp_cpu_offload": cpu_offload,
            "mixed_precision": mixed_precision,
            "enable_sharded_grad_scaler": enable_sharded_grad_scaler,
            "use_pure_fp16": use_pure_fp16,
            "sharded_grad_scaler_kwargs": sharded_grad_scaler_kwargs,
        }
        options = {
            **fsdp_kwargs,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "sharding_strategy": sharding_strategy,
            "mixed_precision": mixed_precision,
            "forward_prefetch": forward_prefetch,
            "use_orig_params": use_orig_params,
        }
        if fsdp_models.device_type() == "cpu":
            options.setdefault("device_id", torch.device("cpu"))

        if not must_fail:
            reference = self._reference_model(model_class, ref_init_fn, use_pure_fp16, init_kwargs or {})
            ref_loss = self._train_for_several_steps(reference, autocast=mixed_precision is not None, **training)

        model = self._fsdp_model(model_class, fsdp_init_mode, device_init_mode, options, init_kwargs or {})
        if use_pure_fp16:
            model = model.half()
        fsdp_models.move_if_now(model, device_init_mode, DEVICEInitMode.DEVICE_AFTER)
        if offloads and not must_fail:
            self._assert_on_cpu(model, "before training")
        with self._refused_for_its_device() if must_fail else nullcontext():
            loss = self._train_for_several_steps(model, autocast=False, save_model=save_model, **training)
        if must_fail:
            return

        if offloads:
            self._assert_on_cpu(model, "after training")
            loss = loss.to(fsdp_models.device_type())
        full_parameters = get_full_params(model)
        torch.testing.assert_close(ref_loss, loss, check_dtype=False, msg=lambda text: f"loss of FSDP:\n{text}")
        if mixed_precision is None and not use_pure_fp16:
            for (name, expected), actual in zip(reference.named_parameters(), full_parameters, strict=True):
                self.assertEqual(expected, actual, exact_device=True, msg=f"{name}: reference against FSDP")

    def _reference_model(
        self,
        model_class: type[FSDPTestModel],
        ref_init_fn: Callable[[nn.Module], nn.Module] | None,
        use_pure_fp16: bool,
        init_kwargs: dict[str, Any],
    ) -> nn.Module:
        # Delays make FSDP's streams overlap; the reference's numbers do not depend on them.
        init_kwargs = {**init_kwargs, **({"delay_after_loss_ms": 0} if "delay_after_loss_ms" in init_kwargs else {})}
        model = model_class.init(
            self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE, deterministic=True, **init_kwargs
        )
        reference = _ddp(model, self.process_group.rank()) if ref_init_fn is None else ref_init_fn(model)
        return reference.half() if use_pure_fp16 else reference

    def _fsdp_model(
        self,
        model_class: type[FSDPTestModel],
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        options: dict[str, Any],
        init_kwargs: dict[str, Any],
    ) -> FSDP:
        """Create the model, wrapped as a whole. Raises ValueError if it cannot be created."""
        try:
            model = model_class.init(
                self.process_group, fsdp_init_mode, device_init_mode, options, deterministic=True, **init_kwargs
            )
        except Exception as error:
            raise ValueError(f"Initializing {model_class} raised error {error}") from error
        # Some models wrap only their submodules; the reference wraps the whole.
        return model if isinstance(model, FSDP) else FSDP(model, self.process_group, **options)

    def _refused_for_its_device(self: Any) -> AbstractContextManager[Any]:
        refused: AbstractContextManager[Any] = self.assertRaisesRegex(
            RuntimeError,
            "An FSDP-managed module with parameter CPU offloading enabled "
            f"has parameters on {fsdp_models.device_type()}",
        )
        return refused

    def _assert_on_cpu(self: Any, model: nn.Module, when: str) -> None:
        for name, parameter in model.named_parameters():
            self.assertEqual(parameter.device.type, "cpu", msg=f"device of {name} {when}")


def _expected_loss_dtype(is_fsdp: bool, mixed_precision: MixedPrecision | None, use_pure_fp16: bool) -> torch.dtype:
    if use_pure_fp16:
        return torch.float16
    if is_fsdp and mixed_precision is not None and mixed_precision.param_dtype is not None:
        return mixed_precision.param_dtype
    # Autocast computes the reference's loss in float32.
    return torch.float32


def _ddp(model: nn.Module, rank: int) -> DDP:
    kind = fsdp_models.device_type()
    if kind == "cpu":
        return DDP(model)
    # A rank on an HPU sees one device.
    index = 0 if kind == "hpu" else rank
    return DDP(model, device_ids=[torch.device(kind, index)], output_device=torch.device(kind, index))


# --------------------------------------------------------------------------------------------------------------------
# The bases of FSDP tests: with fresh ranks, persistent ranks or threads.
#
# This module imports FSDP and tensor parallelism instead of leaving that to their first use: ranks are forked after
# the test module is imported and inherit what it imported. No accelerator is touched.


def get_devtype() -> torch.device:
    return torch.device(fsdp_models.device_type())


class FSDPTest(FSDPTestMixin, MultiProcessTestCase):
    """A MultiProcessTestCase for FSDP: every rank has a process group, a device and a seed.

    There is one rank for each accelerator. On a machine without accelerators, a test skips unless it allows the CPU:
    `@skip_if_lt_x_gpu(n, allow_cpu=True)` runs there under gloo, in n ranks, at least 2. A subclass may override
    `device_type`, also to use the CPU beside accelerators, `world_size`, and with `_run` everything that happens in a
    rank.
    """

    def setUp(self) -> None:
        super().setUp()
        _keep_nccl_quiet()
        self._spawn_processes()

    @property
    def world_size(self) -> int:
        if fsdp_models.constants.is_set("DEVICE_COUNT"):
            return fsdp_models.device_count()
        return (
            max(2, _devices_needed(self)) if _runs_on_cpu(self) else accelerators.ranks_for(_devices_needed(self)) or 1
        )

    @property
    def device_type(self) -> str:
        """The type of the accelerators, or "cpu" if there are fewer than the test needs."""
        if fsdp_models.constants.is_set("DEVICE_TYPE") or fsdp_models.in_whole_world():
            return fsdp_models.device_type()
        enough = accelerators.most_ranks() >= max(1, _devices_needed(self))
        return (accelerators.accelerator_type() if enough else None) or "cpu"

    @property
    def process_group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def destroy_pg_upon_exit(self) -> bool:
        # _run does it.
        return False

    @property
    def init_method(self) -> str:
        return f"{FILE_SCHEMA}{self.file_name}"

    def _known_skip(self) -> TestSkip | None:
        if self._decides_about_skips():
            return None
        return super()._known_skip() or _missing_devices(self, accelerators.most_ranks())

    def _skip_in_rank(self) -> TestSkip | None:
        fsdp_models.use_device_type(self.device_type)
        return _missing_devices(self, fsdp_models.most_ranks_here())


def _test_function(test: FSDPTest) -> Any:
    return getattr(test, test._testMethodName)


def _devices_needed(test: FSDPTest) -> int:
    return most_needed([_test_function(test)])


def _runs_on_cpu(test: FSDPTest) -> bool:
    chosen = type(test).device_type is not FSDPTest.device_type
    return test.device_type == "cpu" and (chosen or _may_use_cpu(_test_function(test)))


def _missing_devices(test: FSDPTest, count: int) -> TestSkip | None:
    """The skip, if `count` accelerators are too few for the ranks and the test may not use the CPU."""
    if _runs_on_cpu(test):
        return None
    ranks = int(test.world_size)
    if count < ranks:
        return too_few_devices(ranks) if count else TEST_SKIPS["no_accelerator"]
    return None


class FSDPTestContinuous(FSDPTestMixin, MultiProcContinuousTest):
    """A MultiProcContinuousTest for FSDP, by default with one rank for each accelerator.

    On a machine without accelerators, a test skips unless it allows the CPU, and there are two ranks.
    """

    @classmethod
    def backend_str(cls) -> str:
        size = checked_world_size(cls._get_world_size(fsdp_models.device_type()), f"{cls.__qualname__}.world_size")
        return fsdp_models.backend_for(size)

    @classmethod
    def device_type(cls) -> str:
        return fsdp_models.device_type()

    @classmethod
    def _get_world_size(cls, device_type: str) -> Any:
        # This holds for a property, too.
        if cls.world_size != UNSET:
            return super()._get_world_size(device_type)
        if device_type == "cpu":
            return 2 if cls._allows_cpu() else fsdp_models.device_count()
        if fsdp_models.constants.is_set("DEVICE_COUNT"):
            return fsdp_models.device_count()
        return accelerators.ranks_for(cls._devices_needed())

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        _keep_nccl_quiet()
        device = fsdp_models.compute_device(rank)
        if fsdp_models.most_ranks_here() < world_size and not (device.type == "cpu" and cls._allows_cpu()):
            raise Skipped(too_few_devices(world_size))
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        super()._init_pg(rank, world_size, rdvz_file)

    @classmethod
    def _allows_cpu(cls) -> bool:
        """Does any of its tests? The others skip in the parent, unless the class overrides what decides about that."""
        return any(_may_use_cpu(getattr(cls, name, None)) for name in dir(cls))

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        compiler_state.reset_dynamo()
        super()._run_test_given_id(test_id, **kwargs)
        compiler_state.reset_dynamo()

    def _known_skip(self) -> TestSkip | None:
        if self._decides_about_skips():
            return None
        on_cpu = fsdp_models.device_type() == "cpu"
        if on_cpu and not _may_use_cpu(getattr(self, self._testMethodName)):
            return TEST_SKIPS["no_accelerator"]
        return super()._known_skip()

    @property
    def process_group(self) -> Any:
        return dist.group.WORLD


class FSDPTestMultiThread(MultiThreadedTestCase):
    """A MultiThreadedTestCase for FSDP, with one thread for each device."""

    @property
    def world_size(self) -> int:
        return fsdp_models.device_count()

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def run_subtests(self, *args: Any, **kwargs: Any) -> Any:
        return run_subtests(self, *args, **kwargs)

    def perThreadSetUp(self) -> None:
        compiler_state.reset_dynamo()

    def perThreadTearDown(self) -> None:
        compiler_state.reset_dynamo()


def _may_use_cpu(test: Any) -> bool:
    return fsdp_models.in_whole_world() or any(need.allow_cpu for need in needs_of(test))


def _keep_nccl_quiet() -> None:
    # "1" starts NCCL's clean-up thread, which has made tests fail at random.
    os.environ["TORCH_NCCL_DESYNC_DEBUG"] = "0"


# --------------------------------------------------------------------------------------------------------------------
# Patches of FSDP2's internals: its collectives, and the steps of a parameter group.
#
# Each `patch_*` waits at a barrier after it has read the original and before it restores it. So ranks that are
# threads of one process all read the same original, and all see the replacement until the last one is done.

AnyFunction = Callable[..., Any]


@contextlib.contextmanager
def _replaced(
    owner: Any, name: str, replacement: Any, get: AnyFunction = getattr, put: AnyFunction = setattr
) -> Iterator[None]:
    original = get(owner, name)
    dist.barrier()
    put(owner, name, replacement)
    try:
        yield
    finally:
        dist.barrier()
        put(owner, name, original)


def patch_all_gather(new_all_gather_into_tensor: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(dist, fsdp_parts.all_gather_name(), new_all_gather_into_tensor)


def patch_reduce_scatter(new_reduce_scatter_tensor: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(dist, fsdp_parts.reduce_scatter_name(), new_reduce_scatter_tensor)


def patch_all_reduce(new_all_reduce: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(dist, "all_reduce", new_all_reduce)


def patch_foreach_all_gather(new_foreach_all_gather: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module(), "foreach_all_gather", new_foreach_all_gather)


def patch_foreach_reduce(new_foreach_reduce: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module(), "foreach_reduce", new_foreach_reduce)


def patch_unshard(new_unshard: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module().FSDPParamGroup, "unshard", new_unshard)


def patch_reshard(new_reshard: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module().FSDPParamGroup, "reshard", new_reshard)


def patch_post_backward(new_post_backward: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module().FSDPParamGroup, "post_backward", new_post_backward)


def patch_register_post_backward_hook_backward(new_backward: AnyFunction) -> contextlib.AbstractContextManager[None]:
    return _replaced(fsdp_parts.param_group_module().RegisterPostBackwardFunction, "backward", new_backward)


def reduce_scatter_with_assert(
    cls: Any, orig_reduce_scatter: AnyFunction, assert_fn: AnyFunction, *args: Any, **kwargs: Any
) -> Any:
    """Call `assert_fn` on the output tensor of a reduce-scatter, then reduce and scatter."""
    if not args and "output" not in kwargs:
        raise AssertionError(f"this reduce-scatter names no output: args {args}, kwargs {kwargs}")
    assert_fn(args[0] if args else kwargs["output"])
    return orig_reduce_scatter(*args, **kwargs)


def compiled_fsdp_test(compile_compute_on_module: type | None = None) -> Callable[[AnyFunction], AnyFunction]:
    """Run a test unchanged, and again with every module compiled that it passes to `fully_shard`.

    With `compile_compute_on_module`, only modules of that class are compiled. The test must call `fully_shard` by
    the name that its own file imported. Without Triton for the current device, the second run is omitted with a
    warning.
    """

    def decorator(test: AnyFunction) -> AnyFunction:
        @wraps(test)
        def in_each_mode(*args: Any, **kwargs: Any) -> None:
            test(*args, **kwargs)
            if fsdp_parts.has_triton():
                # Ranks share the machine, so each compiles in its own process.
                compiling = fsdp_parts.compiling_in_this_process()
                with _compiling_fully_shard(test, compile_compute_on_module), compiling:
                    test(*args, **kwargs)
            else:
                warnings.warn(f"{test.__name__}: not run compiled, as Triton is not available here", stacklevel=2)

        return in_each_mode

    return decorator


def _compiling_fully_shard(test: AnyFunction, only: type | None) -> contextlib.AbstractContextManager[None]:
    from torch.distributed.fsdp import fully_shard

    def shard_and_compile(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sharded = fully_shard(module, *args, **kwargs)
        if only is None or isinstance(module, only):
            module.compile()
        return sharded

    return _replaced(test.__globals__, "fully_shard", shard_and_compile, operator.getitem, operator.setitem)
