"""What tests of FSDP and of state dicts ask of torch."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.own_process import in_own_process
from kit.plain_groups import fake_world, world_of_one
from torch import nn

from torch_testing_ext._torch import fsdp_parts


@pytest.mark.parametrize(
    ("name_of", "new", "old"),
    [
        (fsdp_parts.all_gather_name, "all_gather_single", "all_gather_into_tensor"),
        (fsdp_parts.reduce_scatter_name, "reduce_scatter_single", "reduce_scatter_tensor"),
    ],
)
def test_names_of_collectives(name_of, new, old):
    with mock.patch.object(dist, new, lambda: None, create=True):
        assert name_of() == new
    with mock.patch("torch.distributed", SimpleNamespace(**{old: None})):
        assert name_of() == old
    assert callable(getattr(dist, name_of()))


def test_reshards():
    from torch.distributed.fsdp import _runtime_utils

    said, before = [], _runtime_utils._reshard
    with mock.patch.object(_runtime_utils, "_reshard", lambda *args: said.append(args)):
        with fsdp_parts.reshard_preceded_by(lambda: said.append("action")):
            _runtime_utils._reshard("state", "handle", True)
        _runtime_utils._reshard("after")
    assert said == ["action", ("state", "handle", True), ("after",)]
    assert _runtime_utils._reshard is before


@in_own_process
def test_reductions():
    world_of_one()
    said = []
    reduce = getattr(dist, fsdp_parts.reduce_scatter_name())
    with fsdp_parts.reduction_preceded_by(lambda: said.append("action")):
        output = torch.zeros(2)
        getattr(dist, fsdp_parts.reduce_scatter_name())(output, torch.ones(2))
    assert said == ["action"] and output.tolist() == [1, 1]
    assert getattr(dist, fsdp_parts.reduce_scatter_name()) is reduce


def test_states_of_modules():
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp._common_utils import TrainingState

    for state in TrainingState:
        assert fsdp_parts.is_idle(SimpleNamespace(training_state=state)) is (state is TrainingState.IDLE)
    keeps = [
        strategy.name
        for strategy in ShardingStrategy
        if fsdp_parts.keeps_parameters_after_forward(SimpleNamespace(sharding_strategy=strategy))
    ]
    assert keeps == ["SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"]
    assert [strategy.name for strategy in fsdp_parts.hybrid_strategies()] == ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


def test_module_of_groups():
    module = fsdp_parts.param_group_module()
    assert {"FSDPParamGroup", "RegisterPostBackwardFunction", "foreach_all_gather", "foreach_reduce"} <= {*vars(module)}


# A backward asks the driver for its devices, which is noted for the whole process.
@in_own_process
def test_checkpoints():
    """The backward computes activations again."""

    class Counting(nn.Module):
        calls = 0

        def forward(self, tensor):
            self.calls += 1
            return tensor.exp()

    module = Counting()
    fsdp_parts.checkpoint_activations(module)
    result = module(torch.ones(1, requires_grad=True))
    assert module.calls == 1
    result.sum().backward()
    assert module.calls == 2


def test_state_dicts():
    linear, said = nn.Linear(1, 1, bias=False), []
    fsdp_parts.on_state_dict(
        linear,
        lambda module, state, prefix, metadata: said.append(("saved", module is linear, [*state], prefix)),
        lambda module, state, prefix, *_: said.append(("loading", module is linear, [*state], prefix)),
    )
    state = nn.Sequential(linear).state_dict()
    nn.Sequential(linear).load_state_dict(state)
    assert said == [("saved", True, ["0.weight"], "0."), ("loading", True, ["0.weight"], "0.")]


@in_own_process
def test_sharded_tensors():
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    fake_world(2)
    tensor = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert fsdp_parts.is_sharded(tensor) and not fsdp_parts.is_sharded(torch.ones(1)) and not fsdp_parts.is_sharded(1)
    gathered = fsdp_parts.gather_sharded_tensors({"a": tensor, "b": {"c": torch.ones(1)}})
    assert not fsdp_parts.is_sharded(gathered["a"]) and gathered["a"].shape == (4,)
    assert gathered["b"]["c"].item() == 1


def test_extensions():
    cls = fsdp_parts.stream_extension_class()
    assert {"transform_to", "transform_from"} <= {*dir(cls)}

    class Own(cls):
        @staticmethod
        def registry_name():
            return "ours"

        @staticmethod
        def from_descriptor(version):
            return Own()

        def get_descriptor(self):
            return "ours/1"

        def transform_to(self, output):
            return output

        def transform_from(self, input):
            return input

    registry = fsdp_parts.new_extension_registry()
    registry.register(Own)
    assert [type(one) for one in registry.from_descriptor_list(["ours/1"])] == [Own]
    assert fsdp_parts.new_extension_registry().extensions.keys() == registry.extensions.keys() - {"ours"}


@pytest.mark.slow  # imports the compiler
def test_compiling():
    import torch._inductor.config as config

    before = config.compile_threads
    with config.patch(compile_threads=3):
        with fsdp_parts.compiling_in_this_process():
            assert config.compile_threads == 1
        assert config.compile_threads == 3
    assert config.compile_threads == before


def test_triton():
    with mock.patch("torch.utils._triton.has_triton", lambda: "asked"):
        assert fsdp_parts.has_triton() == "asked"
