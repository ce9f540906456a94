"""Models, steps and comparisons shared by the tests of the SPMD compiler.

Every rank has its own weights and data, so that the comparison detects a missing broadcast or reduction.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from torch_testing_ext.distributed._spmd import compile


def capture(*arguments: Any, **options: Any) -> Any:
    """Compile a step into a recorded program, which these tests are about."""
    return compile(*arguments, **{"backend": "capture", **options})


class MLP(nn.Module):
    """Linear layers of the given sizes, with relu in between and sigmoid at the end."""

    def __init__(self, sizes: tuple[int, ...] = (50, 32, 8)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return torch.sigmoid(self.layers[-1](x))


class Tied(nn.Module):
    """An embedding and an output layer that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.embed(x))))


class Mixed(nn.Module):
    """Scalars, uneven shapes, frozen and unused parameters, a buffer that is never written."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 7)
        self.second = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.randn(()))
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.first(x)) + self.shift)
        return self.second(hidden) * self.scale


class Normed(nn.Module):
    """A convolution with batch norm, whose buffers change in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.norm(self.conv(x))).mean(-1))


class Recurrent(nn.Module):
    """An LSTM with an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def weight_normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(10, 8)), nn.Tanh(), nn.Linear(8, 4))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Linear(16, 4))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    x, y = batch
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def sum_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    x, y = batch
    optimizer.zero_grad()
    loss = (model(x) - y).sum()
    loss.backward()
    optimizer.step()
    return loss


def normal_batch(*shape: int, out: tuple[int, ...] = (4,)) -> Callable[[int, int], Any]:
    def batch(rank: int, iteration: int) -> Any:
        generator = torch.Generator().manual_seed(1000 * iteration + rank)
        return torch.randn(*shape, generator=generator), torch.randn(shape[0], *out, generator=generator)

    return batch


def token_batch(rank: int, iteration: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    return torch.randint(0, 12, (6,), generator=generator), torch.randn(6, 12, generator=generator)


@dataclass
class Case:
    """One training to compare with DDP, exactly if `tolerance` is 0."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    step: Callable[..., Any] = step
    tolerance: float = 0.0
    iterations: int = 3
    ddp: dict[str, Any] = field(default_factory=dict)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_device(value: Any, device: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), value)


def train_both(test: Any, case: Case, decorate: Callable[[Callable[..., Any]], Any]) -> Any:
    """Train `case` with the compiled step and with DDP side by side, and compare everything after each step."""
    torch.manual_seed(test.rank)
    model = case.model().to(test.device_type)
    reference = copy.deepcopy(model)
    wrapped = DistributedDataParallel(reference, **case.ddp)
    optimizer, reference_optimizer = case.optimizer(model.parameters()), case.optimizer(reference.parameters())
    compiled = decorate(case.step)
    for i in range(case.iterations):
        batch = to_device(case.batch(test.rank, i), test.device_type)
        mine = compiled(model, optimizer, batch)
        theirs = case.step(wrapped, reference_optimizer, to_device(case.batch(test.rank, i), test.device_type))
        compare(test, case, i, "result", mine, theirs)
        compare_models(test, case, i, model, reference)
        compare_states(test, case, i, model, optimizer, reference, reference_optimizer)
        for each in (optimizer, reference_optimizer):
            for group in each.param_groups:
                group["lr"] = group["lr"] * 0.9  # must take effect without a new trace
    return compiled


def compare_models(test: Any, case: Case, i: int, model: nn.Module, reference: nn.Module) -> None:
    theirs = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        compare(test, case, i, name, param, theirs[name])
        if theirs[name].grad is None:
            test.assertIsNone(param.grad, f"{case.name}: gradient of {name}")
        else:
            compare(test, case, i, f"gradient of {name}", param.grad, theirs[name].grad)
    for (name, mine), other in zip(model.named_buffers(), reference.buffers(), strict=True):
        compare(test, case, i, f"buffer {name}", mine, other)


def compare_states(test: Any, case: Case, i: int, model: Any, mine: Any, reference: Any, theirs: Any) -> None:
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        test.assertEqual(list(mine.state.get(param, {})), list(theirs.state.get(other, {})), f"{case.name}: {name}")
        for key, value in mine.state.get(param, {}).items():
            compare(test, case, i, f"{key} of {name}", value, theirs.state[other][key])


def compare(test: Any, case: Case, i: int, label: str, mine: Any, theirs: Any) -> None:
    if not isinstance(theirs, torch.Tensor):
        mine = torch.utils._pytree.tree_map(whole, mine)
        test.assertEqual(mine, theirs, msg=f"{case.name}, call {i}: {label}")
        return
    mine, theirs = whole(mine).detach(), whole(theirs).detach()
    test.assertEqual(mine.dtype, theirs.dtype, msg=f"{case.name}, call {i}: dtype of {label}")
    message = f"{case.name}, call {i}, rank {test.rank}: {label}"
    torch.testing.assert_close(
        mine, theirs, rtol=case.tolerance, atol=case.tolerance, msg=lambda text: f"{message}: {text}"
    )
