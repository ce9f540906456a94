"""The language of random training programs: fragments by slot, the program that they make, and how it is drawn.

A fragment of the mainstream must not be refused. The others may be refused, but never be silently wrong.
"""
# ruff: noqa: E501 (a fragment is easier to compare with others on one line)

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

TEMPLATE = """\
import math, types, torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

D = {width}


class HandSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            slow = self.state[p].setdefault("slow", p.clone())
            ratio = p.norm() / (p.grad.norm() + 1)
            p.sub_(self.param_groups[0]["lr"] * ratio * p.grad / math.sqrt(p.numel() + 1))
            p.copy_(slow.lerp_(p, 0.5))


def build():
    losses = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.act = 1.0, nn.Identity()
{init}
            self.head = nn.Linear(D, D)

        def forward(self, x):
{forward}
            return self.act(self.head(x) * self.gain)

    model = Net()
    optimizer = {optimizer}
    params, averages = list(model.parameters()), [p.detach().clone() for p in model.parameters()]

    def step(model, optimizer, batch):
        x, y = batch
{step}

    def change(call):
{change}

    return dict(model=model, optimizer=optimizer, step=step, change=change)
"""

# What each layer needs in __init__, and its code in forward: from (n, D) to (n, D).
Layer = tuple[str, str]
LINEAR = "self.l{i} = nn.Linear(D, D)"
PLAIN_LAYERS: list[Layer] = [
    (LINEAR, "x = self.l{i}(x)"),
    ("self.l{i} = nn.Linear(D, D, bias=False)", "x = torch.tanh(self.l{i}(x))"),
    ("self.l{i} = nn.Sequential(nn.Linear(D, 3), nn.GELU(), nn.Linear(3, D))", "x = x + self.l{i}(x)"),
    ("self.l{i} = nn.LayerNorm(D)", "x = self.l{i}(x)"),
    ("self.l{i} = nn.BatchNorm1d(D)", "x = self.l{i}(x)"),
    ("self.l{i} = nn.Dropout(0.3)", "x = self.l{i}(x)"),
    ("self.l{i} = nn.PReLU()", "x = self.l{i}(x)"),
    ("self.l{i} = nn.Parameter(torch.randn(()))", "x = x * self.l{i}"),
    ("self.l{i} = nn.Parameter(torch.randn(D))", "x = x * self.l{i} + 1"),
    ("self.l{i} = nn.Conv1d(1, 1, 3, padding=1)", "x = self.l{i}(x.unsqueeze(1)).squeeze(1)"),
    ("self.l{i} = nn.LSTM(D, D, batch_first=True)", "x = self.l{i}(x.unsqueeze(1))[0][:, -1]"),
    (
        "self.l{i} = nn.TransformerEncoderLayer(D, 1, 8, dropout=0.0, batch_first=True)",
        "x = self.l{i}(x.unsqueeze(1)).squeeze(1)",
    ),
    (
        LINEAR + "\nself.l{i}b = nn.Linear(D, D)\nself.l{i}b.weight = self.l{i}.weight",
        "x = self.l{i}b(torch.sin(self.l{i}(x)))",
    ),
    (LINEAR + ".requires_grad_(False)", "x = self.l{i}(x)"),
    (LINEAR, "pass"),
    ("self.l{i} = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))", "x = self.l{i}(x)"),
    ("self.l{i} = nn.Embedding(D, D)", "x = x + self.l{i}(x.argmax(-1))"),
    ("self.l{i} = nn.Sequential(nn.Linear(D, D), nn.Tanh())", "x = checkpoint(self.l{i}, x, use_reentrant=False)"),
    (LINEAR, "x = F.linear(x, F.normalize(self.l{i}.weight.t()), self.l{i}.bias)"),
    ("self.l{i} = nn.ModuleList([nn.Linear(D, D)] * 2)", "for layer in self.l{i}:\n    x = torch.relu(layer(x))"),
    ("self.l{i} = nn.ParameterList([torch.randn(D), torch.randn(2, 3)])", "x = sum(p.sum() for p in self.l{i}) * x"),
]
ODD_LAYERS: list[Layer] = [
    ("self.l{i} = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))", "x = self.l{i}(x)"),
    ("self.l{i} = nn.Embedding(D, D, max_norm=0.5)", "x = x + self.l{i}(x.argmax(-1))"),
    ("self.l{i} = nn.Embedding(D, D, sparse=True)", "x = x + self.l{i}(x.argmax(-1))"),
    (
        "self.l{i} = nn.Sequential(nn.Linear(D, D), nn.Tanh())",
        "x = checkpoint(self.l{i}, x, use_reentrant=True) if x.requires_grad else self.l{i}(x)",
    ),
    (
        "self.register_buffer('l{i}', torch.zeros(D))",
        "x = x + self.l{i}\nself.l{i} = 0.9 * self.l{i} + 0.1 * x.detach().mean(0)",
    ),
    ("self.register_buffer('l{i}', torch.zeros((), dtype=torch.long))", "self.l{i}.add_(1)\nx = x * 1.01"),
    (LINEAR, "with torch.no_grad():\n    self.l{i}.weight.clamp_(-0.3, 0.3)\nx = self.l{i}(x)"),
    (LINEAR, "self.l{i}.weight.data.mul_(0.9)\nx = self.l{i}(x)"),
    (LINEAR, "x = torch.func.functional_call(self.l{i}, {'weight': self.l{i}.weight * 2}, (x,))"),
    (LINEAR + "\nself.l{i}c = nn.Linear(D, D)", "x = self.l{i}(x) if x.sum() > 0 else self.l{i}c(x)"),
]

OF_GRADIENTS = "for p in model.parameters():\n    if p.grad is not None:\n        "
OF_WEIGHTS = "with torch.no_grad():\n    "
ZERO = "optimizer.zero_grad()"

# By slot, the fragments of the mainstream, and the others. Repeated ones are drawn more often.
SLOTS: dict[str, tuple[list[str], list[str]]] = {
    "zeroing": (
        [ZERO, ZERO, "model.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "pass"],
        ["for p in params:\n    p.grad = None", "if model.head.weight.grad is not None:\n    x = x + model.head.weight.grad.norm()\nmodel.zero_grad()"],
    ),
    "loss": (
        [
            "loss = (out - y).pow(2).mean()",
            "loss = (out - y).pow(2).sum() / len(x)",
            "loss = F.cross_entropy(out, y.argmax(-1))",
            "loss = out[y > 0].pow(2).sum()",
            "loss = F.mse_loss(out, y) + 0.1 * sum(p.pow(2).sum() for p in model.parameters()) * x.mean()",
        ],
        [
            "loss = (out - y).pow(2).mean()\nif loss > 1:\n    loss = loss * 0.5",
            "loss = (out - y).pow(2).mean() * (0.1 if len(losses) else 1.0)\nlosses.append(1)",
            "loss = (out - y).pow(2).mean()\ndist.all_reduce(loss)",
            "loss = (out - y).pow(2).mean()\nshared = loss.detach().clone()\ndist.all_reduce(shared)\nloss = loss / (1 + shared.abs())",
            "loss = F.mse_loss(out, y)\ngrads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, create_graph=True)\nloss = loss + sum(g.pow(2).sum() for g in grads if g is not None)",
            "loss = F.mse_loss(out, y) + 0.1 * max(p.abs().max() for p in model.parameters())",
            "loss = F.mse_loss(out, y) + 0.1 * nn.utils.parameters_to_vector(params).norm()",
        ],
    ),
    "backward": (
        [*["loss.backward()"] * 3, "loss.backward(torch.ones_like(loss))"],
        [
            "loss.backward(retain_graph=True)\nloss.backward()",
            "trained = [p for p in model.parameters() if p.requires_grad]\nfor p, g in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True)):\n    p.grad = g",
            "torch.autograd.backward([loss, out.sum()])",
            "torch.autograd.backward(loss, inputs=[p for p in model.parameters() if p.requires_grad])",
            "loss.backward()\nif not loss.isfinite():\n    return None",
            "loss.backward()\nmodel(x).pow(2).mean().backward()",
        ],
    ),
    "gradients": (
        [
            "pass",
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
            "torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)",
            "norm = sum(p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None)",
        ],
        [
            "torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type=float('inf'))",
            "torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g['params']], 0.1)",
            OF_GRADIENTS + "p.grad = p.grad * 0.5",
            OF_GRADIENTS + "p.grad.data.add_(p.data, alpha=0.1)",
            OF_GRADIENTS + "p.grad.div_(p.numel()).mul_(p.norm() / (p.grad.norm() + 1))",
            OF_GRADIENTS + "p.grad.sub_(p.grad.mean(0))",
            OF_GRADIENTS + "p.grad.add_(torch.randn(p.shape) * 0.1)",
            OF_GRADIENTS + "dist.all_reduce(p.grad)",
            OF_GRADIENTS + "torch.nan_to_num_(p.grad, nan=0.0)",
            "for p in model.parameters():\n    p.grad = x.detach().mean() * torch.ones_like(p)",
            "for p in model.parameters():\n    p.grad = None",
            "torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)",
            "loss = loss * sum(p.grad is not None for p in model.parameters())",
            OF_WEIGHTS + "for p in params:\n        p.mul_(0.99)",
            OF_WEIGHTS + "for p in model.parameters():\n        p.add_(x.mean())",
            OF_WEIGHTS + "torch._foreach_mul_(list(model.parameters()), 0.9)",
            OF_WEIGHTS + "model.head.weight[0] = 0",
            OF_WEIGHTS + "model.head.weight.copy_(F.normalize(model.head.weight))",
            "model.head.weight.data = model.head.weight.data * 0.9",
            "model.head.weight.grad.mul_(0.5)",
            "nn.init.xavier_uniform_(model.head.weight)",
            "model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})",
            "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters())",
            "model.head.requires_grad_(not model.head.weight.requires_grad)",
        ],
    ),
    "update": (
        ["optimizer.step()"],
        [
            OF_WEIGHTS + "for p in params:\n        if p.grad is not None:\n            p -= 0.1 / math.sqrt(p.numel()) * p.grad",
            OF_GRADIENTS + "p.data = p.data - 0.1 * p.grad",
            "torch.optim.SGD(model.parameters(), lr=0.05).step()",
            "optimizer.step()\nfor e, p in zip(averages, model.parameters()):\n    e.lerp_(p.detach(), 0.1)",
            "optimizer.step()\noptimizer.zero_grad()",
            "if len(x) > 3:\n    optimizer.step()",
            "optimizer.step(lambda: loss)",
        ],
    ),
    "result": (
        ["return loss.detach()", "return {'loss': loss.detach(), 'out': out.detach()}", "return None"],
        ["return loss.item(), len(x)", "return [p.grad for p in model.parameters()]", "return model.head.weight.clone()", "return [p.norm() for p in params]"],
    ),
    "optimizer": (
        [
            "torch.optim.SGD(model.parameters(), lr=0.1)",
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)",
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)",
            "torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)",
            "torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)",
            "torch.optim.Adagrad(model.parameters(), lr=0.1)",
            "torch.optim.Adadelta(model.parameters(), lr=0.1)",
            "torch.optim.Adamax(model.parameters(), lr=0.01)",
            "torch.optim.NAdam(model.parameters(), lr=0.01)",
            "torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)",
            "torch.optim.Rprop(model.parameters(), lr=0.01)",
            "torch.optim.AdamW([{'params': [p], 'lr': 0.01 * (k + 1)} for k, p in enumerate(model.parameters())], lr=0.1)",
            "torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)",
            "torch.optim.SGD(model.head.parameters(), lr=0.1)",
        ],
        ["torch.optim.RAdam(model.parameters(), lr=0.01)", "torch.optim.ASGD(model.parameters(), lr=0.01)", "torch.optim.Adafactor(model.parameters(), lr=0.01)", "HandSGD(model.parameters(), lr=0.1)"],
    ),
    # Before a call.
    "changes": (
        [
            "optimizer.param_groups[0]['lr'] *= 0.5",
            "model.eval()",
            "model.train()",
            "optimizer.param_groups[-1]['weight_decay'] = 0.2",
            "model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})",
            "optimizer.load_state_dict(optimizer.state_dict())",
            ZERO,
            "optimizer.zero_grad(set_to_none=False)",
        ],
        [
            "model.head.requires_grad_(False)",
            "model.head.weight.requires_grad_(not model.head.weight.requires_grad)",
            "model.gain = 3.0",
            "model.act = nn.PReLU()",
            "model.head.register_forward_hook(lambda m, args, out: out * 0.5)",
            "model.head.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 0.5 for g in gi))",
            "model.head.weight.register_hook(lambda g: g * 0.5)",
            "model.head.bias.register_post_accumulate_grad_hook(lambda p: [p.grad.mul_(0.5)].clear())",
            "model.head = nn.Linear(D, D)\noptimizer.add_param_group({'params': list(model.head.parameters())})",
            "model.head.weight = nn.Parameter(torch.ones(D, D))",
            "model.head.bias = None",
            "optimizer.state.clear()",
            "for p in model.parameters():\n    p.grad = None",
            "model.head.weight.grad = None",
            OF_WEIGHTS + "model.head.weight.mul_(0.5)",
            "model.head.weight.data.mul_(0.5)",
        ],
    ),
}  # fmt: skip
# Of one or more ranks' batches: DDP would hang if one rank alone refused a batch of one, as batch norm does.
EQUAL_SIZES, OWN_SIZES = st.sampled_from([4, 3, 2, 6, 1]), st.sampled_from([4, 3, 2, 6])


def _indented(lines: list[str], depth: int) -> str:
    return textwrap.indent("\n".join(lines), "    " * depth)


@dataclass(frozen=True)
class Recipe:
    """The fragments of a training program, by value, and how it is called."""

    layers: tuple[Layer, ...]
    optimizer: str
    sizes: tuple[tuple[int, ...], ...]  # of the batches of each call: of all ranks, or of each
    zeroing: str = ZERO
    loss: str = "loss = (out - y).pow(2).mean()"
    backward: str = "loss.backward()"
    gradients: str = "pass"
    update: str = "optimizer.step()"
    after: str = "pass"
    result: str = "return loss.detach()"
    changes: tuple[tuple[int, str], ...] = ()  # before which call, and the code
    width: int = 4
    style: str = "replicate"
    bucket_mb: float | None = None
    odd: tuple[str, ...] = ()  # the fragments that are not of the mainstream

    def source(self) -> str:
        """A module that defines `build()`: a model, its optimizer, a step, and what changes before each call."""
        layers = [[part.replace("{i}", str(i)) for part in layer] for i, layer in enumerate(self.layers)]
        step = [
            self.zeroing, "out = model(x)", self.loss, self.backward, self.gradients, self.update, self.after,
            self.result,
        ]  # fmt: skip
        changes = [f"if call == {call}:\n{_indented([code], 1)}" for call, code in self.changes] or ["pass"]
        return TEMPLATE.format(
            width=self.width,
            init=_indented([init for init, _ in layers], 3),
            forward=_indented([code for _, code in layers], 3),
            optimizer=self.optimizer,
            step=_indented(step, 2),
            change=_indented(changes, 2),
        )


@st.composite
def recipes(draw: Any, max_odd: int = 3) -> Recipe:
    """Recipes of random programs, most of whose fragments are of the mainstream."""
    names = ["layers", *SLOTS, "after", "layers", "gradients", "changes"]  # those with the most to get wrong, twice
    odd_slots = draw(st.lists(st.sampled_from(names), max_size=max_odd, unique=True))
    odd: list[str] = []

    def pick(slot: str, may_be_odd: bool = True) -> Any:
        plain, strange = (PLAIN_LAYERS, ODD_LAYERS) if slot == "layers" else SLOTS[slot]
        is_odd = may_be_odd and slot in odd_slots
        fragment: Any = draw(st.sampled_from(strange if is_odd else plain))
        if is_odd:
            odd.append(" # ".join(fragment) if isinstance(fragment, tuple) else fragment)
        return fragment

    layers = tuple(pick("layers", number == 0) for number in range(draw(st.integers(1, 3))))
    chosen = {slot: pick(slot) for slot in SLOTS if slot != "changes"}
    after = "pass"
    if "after" in odd_slots:
        after = draw(st.sampled_from(SLOTS["gradients"][1]))
        odd.append(after)
    calls = range(draw(st.integers(3, 4)))
    changed = [call for call in calls[1:] if "changes" in odd_slots or draw(st.booleans())]
    sizes = tuple(draw(st.one_of(EQUAL_SIZES.map(lambda n: (n,)), st.tuples(*[OWN_SIZES] * 4))) for _ in calls)
    return Recipe(
        layers=layers,
        sizes=sizes,
        after=after,
        changes=tuple((call, pick("changes")) for call in changed),
        width=draw(st.sampled_from([4, 3, 5])),
        style=draw(st.sampled_from(["replicate", "fully_shard"])),
        bucket_mb=draw(st.sampled_from([None, None, 0.0001])),
        odd=tuple(odd),
        **chosen,
    )
