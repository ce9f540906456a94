"""Small trainings for tests of layouts, with planted mistakes by name."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torch_testing_ext.layouts import tokens

VOCABULARY, WIDTH, BATCH, LENGTH, STEPS = 12, 8, 4, 6, 2


def batch_of(step):
    torch.manual_seed(1000 + step)
    return tokens(VOCABULARY, BATCH, LENGTH)


class Reduce(torch.autograd.Function):
    """Sums over a group in forward; the gradient passes. Between ranks that hold shares of an output."""

    @staticmethod
    def forward(ctx, tensor, group):
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Copy(torch.autograd.Function):
    """Passes in forward; sums the gradient over a group. Before ranks that compute shares."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Block(nn.Module):
    """A gated layer whose hidden dimension is cut over tp by hand."""

    def __init__(self, layout, mistakes=()):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.offset = nn.Parameter(torch.zeros(WIDTH))

    def cut(self):
        size, place = self.layout.size("tp"), self.layout.place("tp")
        if size > 1:
            self.up.weight = nn.Parameter(self.up.weight.detach().chunk(size, 0)[place].clone())
            self.down.weight = nn.Parameter(self.down.weight.detach().chunk(size, 1)[place].clone())

    def forward(self, x):
        hidden = self.norm(x)
        is_cut = self.layout.size("tp") > 1
        if is_cut and "unreduced input" not in self.mistakes:
            hidden = Copy.apply(hidden, self.layout.group("tp"))
        out = self.down(F.silu(self.up(hidden)))
        if is_cut and "unreduced output" not in self.mistakes:
            out = Reduce.apply(out, self.layout.group("tp"))
        return x + out + self.offset


class Model(nn.Module):
    def __init__(self, layout, mistakes=(), layers=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(layout, mistakes) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def cut(self):
        for block in self.blocks:
            block.cut()
        return self

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def reduced(tensor, layout, *axes):
    for axis in axes:
        if layout.size(axis) > 1:
            dist.all_reduce(tensor, group=layout.group(axis))
    return tensor


def train_by_hand(layout, *mistakes):
    """Tensor and data parallel by hand: AdamW, clipping, a loss by all counted labels."""
    model = layout.load(Model(layout, mistakes)).cut()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    layout.checkpoint(
        lambda folder: save(layout, model, optimizer, folder), lambda folder: load(layout, model, optimizer, folder)
    )
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = reduced((labels != -100).sum().double(), layout, "dp")
        if "local token counts" in mistakes:
            counted = (labels != -100).sum().double() * layout.size("dp")
        loss = loss_sum(model(ids), labels) / counted
        if "loss times tp" in mistakes:
            loss = loss * layout.size("tp")
        loss.backward()
        for name, param in model.named_parameters():
            if not (name == "head.weight" and "unreduced head" in mistakes) and "unreduced dp" not in mistakes:
                reduced(param.grad, layout, "dp")
        layout.step(model, optimizer, loss.detach(), clip=lambda model: clip(model, layout, mistakes))


def clip(model, layout, mistakes):
    """Clip by the norm of all parts, of which those that are cut over tp are summed."""
    cut = [p for n, p in model.named_parameters() if n.endswith(("up.weight", "down.weight"))]
    rest = [p for n, p in model.named_parameters() if not n.endswith(("up.weight", "down.weight"))]
    if "norm omits head" in mistakes and layout.size("tp") > 1:
        rest = [p for p in rest if p is not model.head.weight]
    own = torch.stack([(p.grad**2).sum() for p in cut]).sum()
    if "local norm" not in mistakes and "norm counts replicas" not in mistakes:
        own = reduced(own, layout, "tp")
    square = own + torch.stack([(p.grad**2).sum() for p in rest]).sum()
    if "norm counts replicas" in mistakes:
        square = reduced(square, layout, "tp")
    norm = square.sqrt()
    for param in model.parameters():
        param.grad.mul_((0.5 / norm).clamp(max=1.0))
    return norm


def save(layout, model, optimizer, folder):
    if not layout.place("dp"):
        torch.save([model.state_dict(), optimizer.state_dict()], f"{folder}.{layout.place('tp')}")


def load(layout, model, optimizer, folder):
    weights, states = torch.load(f"{folder}.{layout.place('tp')}", weights_only=False)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
