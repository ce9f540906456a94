"""What a step may do with values, collectives and compiled functions: right as under DDP, or an error with a remedy."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from spmd_training import MLP, Case, capture, normal_batch, train_both
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

STYLES = parametrize("style", ["replicate", "fully_shard"])


def mlp():
    return MLP((10, 7, 4))


def finish(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def train(model, optimizer, batch):
    return finish(optimizer, (model(batch[0]) - batch[1]).pow(2).mean())


def loss_reducing_step(model, optimizer, batch):
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    dist.all_reduce(loss)  # THE LINE
    return finish(optimizer, loss)


def logging_step(model, optimizer, batch):
    total = train(model, optimizer, batch).detach().clone()
    dist.all_reduce(total)  # THE LINE
    return total


def gathering_step(model, optimizer, batch):
    loss = train(model, optimizer, batch).detach()
    found = [torch.empty_like(loss) for _ in range(2)]
    dist.all_gather(found, loss)  # THE LINE
    return found


def gathering_into_step(model, optimizer, batch):
    loss = train(model, optimizer, batch).detach().view(1)
    found = torch.empty(2)
    dist.all_gather_into_tensor(found, loss)  # THE LINE
    return found


def scattering_step(model, optimizer, batch):
    loss = train(model, optimizer, batch).detach()
    found = torch.empty(1)
    dist.reduce_scatter_tensor(found, loss.repeat(2))  # THE LINE
    return found


def broadcasting_step(model, optimizer, batch):
    loss = train(model, optimizer, batch).detach().clone()
    dist.broadcast(loss, 0, async_op=True).wait()  # THE LINE
    return loss


def waiting_step(model, optimizer, batch):
    loss = train(model, optimizer, batch)
    dist.barrier()  # THE LINE
    return loss


def object_step(model, optimizer, batch):
    loss = train(model, optimizer, batch)
    dist.all_gather_object([None, None], "done")  # THE LINE
    return loss


def formatting_step(model, optimizer, batch):
    loss = train(model, optimizer, batch)
    return f"{loss.item():.3f}"  # THE LINE


def printing_step(model, optimizer, batch):
    loss = train(model, optimizer, batch)
    return f"loss {loss.item()}"  # THE LINE


def text_step(model, optimizer, batch):
    loss = train(model, optimizer, batch)
    return str(loss)  # THE LINE


def percent_step(model, optimizer, batch):
    loss = train(model, optimizer, batch)
    return f"{loss:.3f}"  # THE LINE


def numpy_step(model, optimizer, batch):
    return train(model, optimizer, batch).detach().numpy()  # THE LINE


def sparse_step(model, optimizer, batch):
    mask = torch.eye(len(batch[0])).to_sparse()  # THE LINE
    return train(model, optimizer, (torch.sparse.mm(mask, batch[0]), batch[1]))


COLLECTIVE = ("a graph cannot express", "_functional_collectives")
VALUE = ("no values while it is traced", "Return the tensor from the step")
REFUSED = {
    "loss_reducing": (loss_reducing_step, COLLECTIVE),
    "logging": (logging_step, COLLECTIVE),
    "gathering": (gathering_step, COLLECTIVE),
    "gathering_into": (gathering_into_step, COLLECTIVE),
    "scattering": (scattering_step, COLLECTIVE),
    "broadcasting": (broadcasting_step, COLLECTIVE),
    "waiting": (waiting_step, COLLECTIVE),
    "object": (object_step, COLLECTIVE),
    "formatting": (formatting_step, VALUE),
    "printing": (printing_step, VALUE),
    "text": (text_step, VALUE),
    "percent": (percent_step, VALUE),
    "numpy": (numpy_step, VALUE),
    "sparse": (sparse_step, ("computes with a sparse tensor", "to_dense")),
}


def functional_step(model, optimizer, batch):
    """Functional collectives, in the loss and in what is written to a parameter."""
    group = dist.group.WORLD
    scale = funcol.all_reduce(batch[0].pow(2).mean(), "avg", group)
    loss = train(model, optimizer, (batch[0] / scale, batch[1]))
    with torch.no_grad():
        next(model.parameters()).mul_(1 - 0.1 * scale)
    return loss, funcol.all_gather_tensor(loss.detach().view(1), 0, group)


def growing_batch(rank, iteration):
    """Only rank 0 gets batches of other sizes, and traces again."""
    return normal_batch(6 + iteration * (rank == 0), 10)(rank, iteration)


def counting_step(model, optimizer, batch):
    """A collective on a number, whose value the tracer knows: it must not communicate while it traces."""
    count = funcol.all_reduce(torch.tensor(float(len(batch[0]))), "sum", dist.group.WORLD)
    loss = (model(batch[0]) - batch[1]).pow(2).sum() * dist.get_world_size() / count
    return finish(optimizer, loss), count


compiled_loss = torch.compile(lambda out, target: (out - target).pow(2).mean(), backend="eager")


def compiled_loss_step(model, optimizer, batch):
    return finish(optimizer, compiled_loss(model(batch[0]), batch[1]))


class Trainer:
    """A step that is a method."""

    weight = 2.0

    def step(self, model, optimizer, batch):
        return finish(optimizer, (model(batch[0]) - batch[1]).pow(2).mean() * self.weight)


class Attention(nn.Module):
    """Attention without dropout in a checkpointed region."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(10, 8), nn.Linear(8, 4)

    def attend(self, x):
        heads = self.first(x).view(2, 3, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(6, 8)

    def forward(self, x):
        return self.out(checkpoint(self.attend, x, use_reentrant=False))


def generator_step():
    """A step with a generator of its own for the compiled side and for DDP's."""
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]

    def noisy_step(model, optimizer, batch):
        generator = generators[isinstance(model, DistributedDataParallel)]
        return train(model, optimizer, (batch[0] + torch.randn(batch[0].shape, generator=generator), batch[1]))

    return noisy_step


RIGHT = {
    "functional_collectives": Case("functional", mlp, normal_batch(6, 10), step=functional_step, tolerance=1e-6),
    "functional_collective_of_a_number": Case("number", mlp, growing_batch, step=counting_step),
    "compiled_loss": Case("compiled loss", mlp, normal_batch(6, 10), step=compiled_loss_step),
    "method": Case("method", mlp, normal_batch(6, 10), step=Trainer().step),
    "checkpointed_attention": Case("attention", Attention, normal_batch(6, 10), step=train),
    "generator": Case("generator", mlp, normal_batch(6, 10), step=generator_step()),
}


class TestRefusals(DTensorContinuousTestBase):
    """Steps on two ranks."""

    @property
    def world_size(self):
        return 2

    def _model(self):
        torch.manual_seed(self.rank)
        model = mlp().to(self.device_type)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    @STYLES
    @parametrize("name", list(REFUSED))
    def test_refused(self, name, style):
        step, fragments = REFUSED[name]
        model, optimizer = self._model()
        before = [p.clone() for p in model.parameters()]
        with self.assertRaises(SPMDError) as caught:
            capture(parallel_mode=DataParallel(style))(step)(model, optimizer, normal_batch(6, 10)(self.rank, 0))
        for fragment in (*fragments, "THE LINE"):
            self.assertIn(fragment, str(caught.exception))
        self.assertEqual(before, list(model.parameters()), rtol=0, atol=0)
        str(before), f"{before[0].sum():.3f}", before[0].detach().numpy()  # work again outside of the step

    @STYLES
    @parametrize("name", list(RIGHT))
    def test_right(self, name, style):
        train_both(self, RIGHT[name], capture(parallel_mode=DataParallel(style)))

    def test_change_of_the_shape_of_a_sharded_gradient(self):
        def step(model, optimizer, batch):
            loss = finish(optimizer, (model(batch[0]) - batch[1]).pow(2).mean())
            next(model.parameters()).grad.t_()  # THE LINE
            return loss

        model, optimizer = self._model()
        with self.assertRaisesRegex(SPMDError, r"(?s)changes the shape of a tensor that is sharded, by t_.*THE LINE"):
            capture(parallel_mode=DataParallel("fully_shard"))(step)(
                model, optimizer, normal_batch(6, 10)(self.rank, 0)
            )

    def test_sparse(self):
        model, optimizer = self._model()
        x, y = normal_batch(6, 10)(self.rank, 0)
        with self.assertRaisesRegex(SPMDError, "(?s)is sparse.*to_dense"):
            capture()(train)(model, optimizer, (x.to_sparse(), y))
        with self.assertRaisesRegex(SPMDError, "(?s)is sparse.*to_dense"):
            capture()(train)(model, optimizer, (x.to_sparse_csr(), y))
        model = nn.Sequential(nn.Embedding(12, 4, sparse=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for style in ("replicate", "fully_shard"):
            with self.assertRaisesRegex(SPMDError, "(?s)gradient of 0.weight is sparse.*sparse=False"):
                capture(parallel_mode=DataParallel(style))(train)(model, optimizer, (torch.arange(6), y))

    def test_dropout_between_recurrent_layers(self):
        model = nn.ModuleDict({"lstm": nn.LSTM(10, 4, 2, dropout=0.5)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @capture()
        def recurrent_step(model, optimizer, batch):
            return finish(optimizer, (model["lstm"](batch[0])[0] - batch[1]).pow(2).mean())

        with self.assertRaisesRegex(SPMDError, "(?s)lstm has dropout between its layers.*nn.Dropout"):
            recurrent_step(model, optimizer, normal_batch(6, 10)(self.rank, 0))
        model.eval()
        recurrent_step(model, optimizer, normal_batch(6, 10)(self.rank, 0))

    @STYLES
    def test_two_fused_optimizers_on_the_same_parameters(self, style):
        def both_step(model, optimizers, batch):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = (model(batch[0]) - batch[1]).pow(2).mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return loss

        class Both(list):
            """Two optimizers that look like one to `train_both`."""

            @property
            def param_groups(self):
                return self[0].param_groups[:]

            state = property(lambda self: {})

        def optimizers(params):
            params = list(params)
            return Both([torch.optim.SGD(params, lr=0.1, fused=True), torch.optim.Adam(params, lr=0.1, fused=True)])

        case = Case("two fused", mlp, normal_batch(6, 10), optimizers, both_step, tolerance=1e-6, iterations=5)
        compiled = capture(parallel_mode=DataParallel(style))(
            lambda model, optimizers, batch: both_step(model, optimizers, batch)
        )
        train_both(self, case, lambda step: lambda model, both, batch: compiled(model, [*both], batch))


instantiate_parametrized_tests(TestRefusals)

if __name__ == "__main__":
    run_tests()
