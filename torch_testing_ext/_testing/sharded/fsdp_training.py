"""FSDPTestMixin, which trains a model under FSDP and under a reference and compares the results."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_testing_ext._testing.bases.distributed_bases import run_subtests
from torch_testing_ext._testing.bases.rank_accounts import account_for
from torch_testing_ext._testing.bases.rank_handles import account_behind
from torch_testing_ext._testing.marks.needs import Skipped, TestSkip, too_few_devices
from torch_testing_ext._torch import fsdp_parts

from . import fsdp_devices
from .fsdp1_models import FSDPInitMode, FSDPTestModel
from .fsdp_devices import DEVICEInitMode
from .fsdp_states import _zero_model, get_full_params


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
        fsdp_devices.run_in_group(self, test_name, pipe, bool(kwargs.get("fake_pg")))

    def _skip_in_rank(self: Any) -> TestSkip | None:
        """Decide in a fresh rank whether the devices are too few."""
        size = int(self.world_size)
        are_enough = fsdp_devices.device_type() == "cpu" or fsdp_devices.most_ranks_here() >= size
        return None if are_enough else too_few_devices(size)

    def run_subtests(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_subtests(self, *args, **kwargs)

    # PyTorch's tests of FSDP call the next three.
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
        kind = fsdp_devices.device_type()
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
        if fsdp_devices.device_type() == "cpu":
            options.setdefault("device_id", torch.device("cpu"))

        if not must_fail:
            reference = self._reference_model(model_class, ref_init_fn, use_pure_fp16, init_kwargs or {})
            ref_loss = self._train_for_several_steps(reference, autocast=mixed_precision is not None, **training)

        model = self._fsdp_model(model_class, fsdp_init_mode, device_init_mode, options, init_kwargs or {})
        if use_pure_fp16:
            model = model.half()
        fsdp_devices.move_if_now(model, device_init_mode, DEVICEInitMode.DEVICE_AFTER)
        if offloads and not must_fail:
            self._assert_on_cpu(model, "before training")
        with self._refused_for_its_device() if must_fail else nullcontext():
            loss = self._train_for_several_steps(model, autocast=False, save_model=save_model, **training)
        if must_fail:
            return

        if offloads:
            self._assert_on_cpu(model, "after training")
            loss = loss.to(fsdp_devices.device_type())
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
            f"has parameters on {fsdp_devices.device_type()}",
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
    kind = fsdp_devices.device_type()
    if kind == "cpu":
        return DDP(model)
    # A rank on an HPU sees one device.
    index = 0 if kind == "hpu" else rank
    return DDP(model, device_ids=[torch.device(kind, index)], output_device=torch.device(kind, index))
