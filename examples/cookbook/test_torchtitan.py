"""The debug models of torchtitan under each layout, if it is installed: its meshes, plans, pipeline and clipping.

Run it: pytest examples/cookbook/test_torchtitan.py
"""

import dataclasses

import pytest
import torch

from torch_testing_ext.layouts import tokens

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
from torchtitan.tools import utils

# It is read when its other modules are imported.
utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, utils as parallel_utils  # noqa: E402
from torchtitan.models import deepseek_v3, llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402

TORCH_DTYPE_MAP["float64"] = torch.float64
LAYERS, LENGTH, BATCH = 2, 8, 4


def grouped_product(self, *, A, B_t, offs):
    """The product of each expert's tokens with its weights: the CPU has none in float64."""
    groups = A.tensor_split(offs[:-1].tolist())
    return torch.cat([tokens @ weight for tokens, weight in zip(groups, B_t, strict=True)])


GroupedExperts._grouped_mm = grouped_product


def debug_model(library):
    """The debug model of a library of torchtitan, with fewer layers and attention that the CPU has."""
    spec = library.model_registry("debugmodel")
    layers = spec.model.layers[:LAYERS]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, layers=layers))


class Trainer:
    """What torchtitan's trainer does, without its logs, checkpoints and GPUs."""

    def __init__(self, layout, library):
        assert layout.mesh is not None
        spec = debug_model(library)
        self.parallelism = ParallelismConfig(
            data_parallel_replicate_degree=layout.size("dp_replicate"),
            data_parallel_shard_degree=layout.size("dp_shard") * layout.size("ep"),
            tensor_parallel_degree=layout.size("tp"),
            pipeline_parallel_degree=layout.size("pp"),
            expert_parallel_degree=layout.size("ep"),
            pipeline_parallel_schedule="1F1B",
            spmd_backend="partial_dtensor",
        )
        self.training = TrainingConfig(
            seq_len=LENGTH, local_batch_size=BATCH, mixed_precision_param="float64", mixed_precision_reduce="float64"
        )
        world = torch.distributed.get_world_size()
        self.dims = ParallelDims.from_config(self.parallelism, world)
        parallel_utils.set_spmd_backend(self.parallelism.spmd_backend)
        self.dims.build_mesh()
        spec.model.update_from_config(config=self)
        with torch.device("meta"):
            model = spec.model.build()
        options = {
            "parallel_dims": self.dims,
            "training": self.training,
            "parallelism": self.parallelism,
            "compile_config": CompileConfig(),
            "ac_config": None,
            "dump_folder": "",
        }
        self.parts, self.schedule, self.is_last = [model], None, True
        if self.dims.pp_enabled:
            self.schedule, self.parts, self.is_first, self.is_last = spec.pipelining_fn(
                model,
                device=torch.device("cpu"),
                model_config=spec.model,
                parallelize_fn=spec.parallelize_fn,
                # It expects the metrics of the loss, too.
                loss_fn=lambda logits, labels: (self.loss(logits, labels), {}),
                **options,
            )
        else:
            self.parts = [spec.parallelize_fn(model, **options)]
        for part in self.parts:
            part.to_empty(device="cpu")
            with torch.no_grad():
                part.init_weights(buffer_device=None)
            part.train()
        layout.load(self.parts)
        self.optimizer = torch.optim.AdamW([param for part in self.parts for param in part.parameters()])
        if spec.post_optimizer_build_fn is not None:
            # Balances the load of experts before each step.
            spec.post_optimizer_build_fn(self.optimizer, self.parts, self.dims)

    def loss(self, logits, labels):
        return cross_entropy_loss(logits, labels) / self.counted

    def step(self, ids, labels, counted):
        self.counted = counted
        if self.schedule is None:
            loss = self.loss(self.parts[0](ids), labels)
            loss.backward()
            return loss.detach()
        losses = []
        self.schedule.step(
            *([ids] if self.is_first else []), **({"target": labels, "losses": losses} if self.is_last else {})
        )
        return torch.stack(losses).sum().detach() if self.is_last else None

    def clip(self, _):
        return parallel_utils.clip_grad_norm_(
            [param for part in self.parts for param in part.parameters()],
            1.0,
            pp_mesh=self.dims.get_optional_mesh("pp"),
            ep_enabled=self.dims.ep_enabled,
        )


def batch_of(step):
    torch.manual_seed(step)
    return tokens(2048, BATCH, LENGTH)


def train(layout, library):
    trainer = Trainer(layout, library)
    for step, (ids, labels) in enumerate(layout.batches(batch_of, steps=2)):
        counted = (batch_of(step)[1] != -100).sum()
        loss = trainer.step(ids, labels, counted)
        layout.step(trainer.parts, trainer.optimizer, loss, clip=trainer.clip)


@pytest.mark.slow
@pytest.mark.layouts("dp_shard=2", "dp_replicate=2", "tp=2", "dp_shard=2 tp=2", "pp=2")
def test_llama(layout):
    train(layout, llama3)


@pytest.mark.slow
@pytest.mark.layouts("dp_shard=2", "tp=2", "ep=2", "dp_shard=2 tp=2", "pp=2")
def test_experts(layout):
    train(layout, deepseek_v3)
