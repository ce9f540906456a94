"""common_fsdp: the base class, parity training, the models and the patches."""

from __future__ import annotations

import functools
import types
import unittest
import warnings
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

from torch_testing_ext import common_fsdp, launch
from torch_testing_ext._machine import accelerators
from torch_testing_ext._torch import fsdp_parts
from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
from torch_testing_ext.common_fsdp import (
    MLP,
    AlwaysWrapNestedWrappedModule,
    DEVICEInitMode,
    DummyDDP,
    FSDPInitMode,
    FSDPTest,
    FSDPTestMixin,
    MixtureOfExperts,
    MLPStack,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    NonUniformReqGradNWM,
    TransformerWithSharedParams,
    _assert_module_states,
    _broadcast_state_dict,
    _get_state_dict,
    _zero_model,
    check_sharded_parity,
    compiled_fsdp_test,
    get_devtype,
    get_full_params,
    patch_reduce_scatter,
    reduce_scatter_with_assert,
)
from torch_testing_ext.common_utils import (
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    set_rng_seed,
    subtest,
)

BEFORE = DEVICEInitMode.DEVICE_BEFORE


class ParityTest(FSDPTest):
    @property
    def world_size(self) -> int:
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize(
        "model_class",
        [
            subtest(cls, name=cls.__name__)
            for cls in (
                NestedWrappedModule,
                AlwaysWrapNestedWrappedModule,
                TransformerWithSharedParams,
                MixtureOfExperts,
                NestedWrappedModuleWithDelay,
            )
        ],
    )
    def test_matches_ddp(self, model_class):
        reference = DummyDDP if model_class is MixtureOfExperts else None  # reduces its gradients itself
        for strategy in (None, ShardingStrategy.SHARD_GRAD_OP):
            self._test_fsdp_parity(
                model_class, FSDPInitMode.RECURSIVE, BEFORE, ref_init_fn=reference, sharding_strategy=strategy
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_partly_frozen_matches_ddp(self):
        self._test_fsdp_parity(NonUniformReqGradNWM, FSDPInitMode.RECURSIVE, BEFORE, use_orig_params=True)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_low_precision_loss_has_its_dtype(self):
        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = NestedWrappedModule.init(self.process_group, FSDPInitMode.NO_FSDP, BEFORE, deterministic=True)
        wrapped = FSDP(model, mixed_precision=half, device_id=self._device())
        loss = self._train_for_several_steps(wrapped, 1, autocast=False, mixed_precision=half)
        self.assertEqual(loss.dtype, torch.bfloat16)
        with self.assertRaisesRegex(AssertionError, "dtype of the loss"):
            self._train_for_several_steps(wrapped, 1, autocast=False)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_wrong_gradient_is_noticed(self):
        class Forgetful(NestedWrappedModule):
            """Its reference does not average gradients over ranks: DDP's hook is skipped."""

        with self.assertRaisesRegex(AssertionError, "loss of FSDP|reference against FSDP"):
            self._test_fsdp_parity(Forgetful, FSDPInitMode.RECURSIVE, BEFORE, ref_init_fn=DummyDDP)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_lost_state_is_noticed(self):
        class LosesWeights(NestedWrappedModule):
            @staticmethod
            def init(*args, **kwargs):
                model = NestedWrappedModule.init(*args, **kwargs)
                model.register_load_state_dict_pre_hook(lambda module, state, *rest: state.clear())
                return model

        with self.assertRaisesRegex(RuntimeError, "Missing key"):
            self._test_fsdp_parity(LosesWeights, FSDPInitMode.RECURSIVE, BEFORE)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_fsdp_is_refused(self):
        with self.assertRaisesRegex(AssertionError, "NO_FSDP"):
            self._test_fsdp_parity(NestedWrappedModule, FSDPInitMode.NO_FSDP, BEFORE)

    def _device(self):
        return torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, self.rank)


instantiate_parametrized_tests(ParityTest)


class RankTest(FSDPTest):
    """The state of a rank, and the number of ranks."""

    @skip_if_lt_x_gpu(3, allow_cpu=True)
    def test_a_rank_for_each_device_asked_for(self):
        on_cpu = self.device_type == "cpu"
        self.assertEqual(dist.get_world_size(), 3 if on_cpu else torch.accelerator.device_count())
        self.assertEqual(dist.get_world_size(), self.world_size)
        self.assertEqual(dist.get_rank(), self.rank)
        self.assertIs(self.process_group, dist.group.WORLD)
        self.assertEqual(get_devtype().type, self.device_type)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_a_type_of_device_that_a_test_has_set(self):
        common_fsdp.DEVICE_TYPE = "meta"
        self.assertEqual(self.device_type, "meta")

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_seeds_are_the_same(self):
        first = torch.rand(2)
        drawn = [None] * dist.get_world_size()
        dist.all_gather_object(drawn, first.tolist())
        self.assertEqual(len({tuple(values) for values in drawn}), 1)
        set_rng_seed()
        self.assertEqual(first, torch.rand(2))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_subtests(self):
        seen = []
        self.run_subtests({"a": [1, 2], "b": [3, 4]}, lambda a, b: seen.append((a, b)))
        self.assertEqual(seen, [(1, 3), (1, 4), (2, 3), (2, 4)])


class OptionsTest(TestCase):
    @parametrize("option", ["cpu_offload", "backward_prefetch", "forward_prefetch"])
    def test_of_a_wrapped_model(self, option):
        check, model = getattr(FSDPTestMixin, f"_check_{option}"), types.SimpleNamespace(**{option: True})
        check(self, model, True)
        with self.assertRaises(AssertionError):
            check(self, model, False)


instantiate_parametrized_tests(OptionsTest)


class FakeGroupTest(FSDPTest):
    """With `fake_pg`, ranks have a group without communication."""

    fake_pg = True

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_nothing_is_sent(self):
        self.assertEqual(dist.get_backend(), "fake")
        self.assertEqual(dist.get_world_size(), self.world_size)
        ones = torch.ones(2, device=self.device_type)
        dist.all_reduce(ones)
        self.assertEqual(ones, torch.ones(2, device=self.device_type))


class Placed(FSDPTest):
    """Subjects for PlacementTest, which are not run themselves."""

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def allows_cpu(self):
        pass

    @skip_if_lt_x_gpu(4)
    def needs_four(self):
        pass

    def says_nothing(self):
        pass


class PlacementTest(TestCase):
    """The number of ranks of a test, their device, or the reason for a skip, on machines with any number of devices."""

    def placement(self, test: str, devices: int) -> tuple[str, int]:
        with self.machine(devices):
            case = Placed(test)
            return case.device_type, case.world_size

    def skip_reason(self, test: str, devices: int) -> str:
        result = unittest.TestResult()
        with self.machine(devices), mock.patch.object(launch, "launch", self.fail):
            Placed(test).run(result)
        self.assertEqual(len(result.skipped), 1, [text for _, text in result.failures + result.errors])
        return result.skipped[0][1]

    @contextmanager
    def machine(self, devices: int):
        kind = "cuda" if devices else None
        with mock.patch.multiple(accelerators, device_count=lambda: devices, accelerator_type=lambda: kind):
            yield

    def test_ranks(self):
        self.assertEqual(self.placement("allows_cpu", 0), ("cpu", 4))
        self.assertEqual(self.placement("allows_cpu", 4), ("cuda", 4))
        self.assertEqual(self.placement("allows_cpu", 8), ("cuda", 8))
        self.assertEqual(self.placement("needs_four", 8), ("cuda", 8))
        self.assertEqual(self.placement("says_nothing", 3), ("cuda", 3))

    def test_skips_without_starting_a_rank(self):
        self.assertIn("at least 4", self.skip_reason("needs_four", 0))
        self.assertIn("at least 4", self.skip_reason("needs_four", 2))
        self.assertIn("accelerator", self.skip_reason("says_nothing", 0))

    def test_fixed_world_size_needs_as_many_devices(self):
        with mock.patch.object(Placed, "world_size", 2):
            self.assertIn("at least 2", self.skip_reason("says_nothing", 1))


class StateTest(FSDPTest):
    @property
    def world_size(self) -> int:
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_dict_of_rank_0_reaches_all(self):
        state = {"weight": torch.full((2,), float(self.rank))} if self.rank == 0 else {}
        received = _broadcast_state_dict(self.rank, state)
        self.assertEqual(received, {"weight": torch.zeros(2, device=self.device_type)})

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_module_states_are_compared_across_ranks(self):
        model = nn.BatchNorm1d(3)
        _assert_module_states(model, self.process_group, self.assertEqual)
        model.running_mean += self.rank
        with self.assertRaises(AssertionError):
            _assert_module_states(model, self.process_group, self.assertEqual)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_zeroed(self):
        model = nn.BatchNorm1d(3)
        _zero_model(model, summon_full=False)
        self.assertEqual(model.weight.sum().item(), 0)
        self.assertEqual(model.running_var.sum().item(), 3)
        _zero_model(model, zero_buffers=True, summon_full=False)
        self.assertEqual(model.running_var.sum().item(), 0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_half_state_dict(self):
        self.assertEqual(_get_state_dict(nn.Linear(2, 2), half=True)["weight"].dtype, torch.float16)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_the_second_run_is_compiled(self):
        for triton, runs in ((False, [False]), (True, [False, True])):
            seen: list[bool] = []
            test = compiled_fsdp_test(compile_compute_on_module=MLP)(shard_and_note)
            with mock.patch.object(fsdp_parts, "has_triton", lambda answer=triton: answer), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                test(self, seen)
            self.assertEqual(seen, runs)
            self.assertIs(fully_shard, torch.distributed.fsdp.fully_shard)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fully_shard_is_restored_after_a_failure(self):
        def fail(self):
            raise KeyError("meant to be")

        with mock.patch.object(fsdp_parts, "has_triton", lambda: True), self.assertRaises(KeyError):
            compiled_fsdp_test()(fail)(self)
        self.assertIs(fully_shard, torch.distributed.fsdp.fully_shard)


def shard_and_note(case, seen):
    """A test for compiled_fsdp_test: notes whether its module was compiled."""
    model = nn.Sequential(MLP(4)).to(case.device_type)
    mesh = init_device_mesh(case.device_type, (case.world_size,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    case.assertIsNone(model._compiled_call_impl)  # not an MLP
    seen.append(model[0]._compiled_call_impl is not None)


class FullyShardTest(FSDPTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_sharded_parity_holds_and_fails(self):
        mesh = init_device_mesh(self.device_type, (self.world_size,))
        torch.manual_seed(0)
        replicated, sharded = MLP(6).to(self.device_type), MLP(6).to(self.device_type)
        sharded.load_state_dict(replicated.state_dict())
        fully_shard(sharded, mesh=mesh)
        batch = torch.rand(2, 6, device=self.device_type)
        for model in (replicated, sharded):
            model(batch).sum().backward()
        check_sharded_parity(self, replicated, sharded)
        replicated.last = nn.Linear(2, 2)
        with self.assertRaises(ValueError):
            check_sharded_parity(self, replicated, sharded)
        del replicated.last
        replicated.out_proj.bias.grad[0] += 1  # the first row is rank 0's
        if self.rank == 0:
            with self.assertRaisesRegex(AssertionError, r"gradient of out_proj\.bias"):
                check_sharded_parity(self, replicated, sharded)
        else:
            check_sharded_parity(self, replicated, sharded)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_mlp_stack_in_two_dimensions(self):
        mesh = init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        whole = MLPStack(8).to(self.device_type)
        torch.manual_seed(0)
        stack = MLPStack(8).to(self.device_type).parallelize(mesh["tp"], mesh["dp"], use_activation_checkpointing=True)
        batch = torch.rand(2, 8, device=self.device_type)
        self.assertEqual(whole(batch), stack(batch))
        self.assertTrue(all(isinstance(p, DTensor) and p.device_mesh.ndim == 2 for p in stack.parameters()))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_patches_see_each_call(self):
        mesh = init_device_mesh(self.device_type, (self.world_size,))
        model = nn.Sequential(MLP(4), MLP(4)).to(self.device_type)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        originals = {
            "patch_all_gather": getattr(dist, fsdp_parts.all_gather_name()),
            "patch_reduce_scatter": getattr(dist, fsdp_parts.reduce_scatter_name()),
        }
        groups = fsdp_parts.param_group_module()
        for name in ("unshard", "reshard", "post_backward"):
            originals[f"patch_{name}"] = getattr(groups.FSDPParamGroup, name)
        originals["patch_register_post_backward_hook_backward"] = groups.RegisterPostBackwardFunction.backward
        originals["patch_foreach_all_gather"] = groups.foreach_all_gather
        originals["patch_foreach_reduce"] = groups.foreach_reduce
        for name, original in originals.items():
            self.assertGreater(self._calls_seen(name, original, model), 0, name)
        self.assertEqual(self._calls_seen("patch_all_reduce", dist.all_reduce, model), 0)
        self.assertIs(getattr(dist, fsdp_parts.all_gather_name()), originals["patch_all_gather"])

    def _calls_seen(self, patch, original, model):
        calls = []

        def counted(*args, **kwargs):
            calls.append(patch)
            return original(*args, **kwargs)

        batch = torch.rand(2, 4, device=self.device_type, requires_grad=True)
        with getattr(common_fsdp, patch)(counted):
            model(batch).sum().backward()
        seen = len(calls)
        model(batch).sum().backward()
        self.assertEqual(len(calls), seen, f"{patch} is still there after its block")
        return seen

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_reduced_gradients_have_the_size_of_trainable_parameters(self):
        torch.manual_seed(0)
        model = MLP(4).to(self.device_type)
        for name, param in model.named_parameters():
            param.requires_grad_("bias" in name)
        fully_shard(model, mesh=init_device_mesh(self.device_type, (self.world_size,)))
        trained = sum(p.to_local().numel() for name, p in model.named_parameters() if "bias" in name)
        sizes = []
        reduce_scatter = functools.partial(
            reduce_scatter_with_assert,
            self,
            getattr(dist, fsdp_parts.reduce_scatter_name()),
            lambda output: sizes.append(output.numel()),
        )
        with patch_reduce_scatter(reduce_scatter):
            model(torch.rand(2, 4, device=self.device_type)).sum().backward()
        self.assertEqual(sizes, [trained])
        with self.assertRaisesRegex(AssertionError, "names no output"):
            reduce_scatter(group=None)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_full_params(self):
        model = NestedWrappedModule.init(
            self.process_group,
            FSDPInitMode.RECURSIVE,
            BEFORE,
            {"device_id": torch.device(self.device_type, None if self.device_type == "cpu" else self.rank)},
            deterministic=True,
        )
        plain = NestedWrappedModule.init(self.process_group, FSDPInitMode.NO_FSDP, BEFORE, deterministic=True)
        elements = sum(p.numel() for p in plain.parameters())
        self.assertEqual(sum(p.numel() for p in get_full_params(model)), elements)


if __name__ == "__main__":
    run_tests()
