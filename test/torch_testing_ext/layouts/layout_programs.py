"""Small trainings for tests of layouts, with planted mistakes by name."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torch_testing_ext.layouts import tokens

VOCABULARY, WIDTH, BATCH, LENGTH, STEPS = 12, 8, 4, 6, 2


def batch_of(step):
    with torch.random.fork_rng(devices=[]):
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


class Gather(torch.autograd.Function):
    """Joins the parts of a group along a dimension; each gets the sum of its part of the gradients."""

    @staticmethod
    def forward(ctx, tensor, group, dim):
        ctx.group, ctx.dim = group, dim
        return joined(tensor, group, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()].contiguous(), None, None


class Scatter(torch.autograd.Function):
    """Sums over a group and keeps a part; joins the gradients."""

    @staticmethod
    def forward(ctx, tensor, group, dim):
        ctx.group, ctx.dim = group, dim
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        return tensor.chunk(group.size(), dim)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        return joined(gradient, ctx.group, ctx.dim), None, None


def joined(tensor, group, dim):
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


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
        if "scattered over another group" in self.mistakes:
            place = 0
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
        if "dropout" in self.mistakes:
            out = F.dropout(out, 0.3)
        if is_cut and "offset dropped" in self.mistakes:
            return x + out + self.offset.detach()
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
        if layout.size(axis) > 1 and tensor is not None:
            dist.all_reduce(tensor, group=layout.group(axis))
    return tensor


def train_by_hand(layout, *mistakes):
    """Tensor and data parallel by hand: AdamW, a scheduler, clipping, a loss by all counted labels."""
    model = layout.load(Model(layout, mistakes)).cut()
    if "seeded by rank" in mistakes:
        torch.manual_seed(layout.rank)
        nn.init.normal_(model.head.weight)
    if "dropout unlike" in mistakes:
        torch.manual_seed(layout.rank)
    lr = 0.01 * (layout.size("dp") if "learning rate times dp" in mistakes else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if "states made by a step" in mistakes and layout.size("tp") > 1:
        for param in model.parameters():
            zero = torch.zeros_like(param)
            optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": zero, "exp_avg_sq": zero.clone()}
    state = (layout, model, optimizer, scheduler, mistakes)
    layout.checkpoint(lambda folder: save(folder, *state), lambda folder: load(folder, *state))
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = reduced((labels != -100).sum().double(), layout, "dp")
        if "local token counts" in mistakes:
            counted = (labels != -100).sum().double() * layout.size("dp")
        loss = loss_sum(model(ids), labels) / counted
        if "mean of means" in mistakes:
            loss = loss_sum(model(ids), labels) / (labels != -100).sum() / layout.size("dp")
        if "loss times tp" in mistakes:
            loss = loss * layout.size("tp")
        loss.backward()
        for name, param in model.named_parameters():
            if name == "head.weight" and "reduced copy" in mistakes:
                reduced(param.grad.t().contiguous(), layout, "dp")
            elif not (name == "head.weight" and "unreduced head" in mistakes) and "unreduced dp" not in mistakes:
                reduced(param.grad, layout, "dp")
        layout.step(model, optimizer, loss.detach(), lambda model: clip(model, layout, mistakes), scheduler)
        if "scheduler twice on a rank" in mistakes and layout.place("dp"):
            scheduler.step()


def clip(model, layout, mistakes):
    """Clip by the norm of all parts, of which those that are cut over tp are summed."""
    cut = [p for n, p in model.named_parameters() if n.endswith(("up.weight", "down.weight"))]
    rest = [p for n, p in model.named_parameters() if not n.endswith(("up.weight", "down.weight"))]
    if "norm omits head" in mistakes and layout.size("tp") > 1:
        rest = [p for p in rest if p is not model.head.weight]
    own = torch.stack([(p.grad**2).sum() for p in cut]).sum()
    if "norm omits up" in mistakes and layout.size("tp") > 1:
        own = torch.stack([(p.grad**2).sum() for n, p in model.named_parameters() if n.endswith("down.weight")]).sum()
    if not {"local norm", "norm counts replicas", "norms added"} & set(mistakes):
        own = reduced(own, layout, "tp")
    square = own + torch.stack([(p.grad**2).sum() for p in rest if p.grad is not None]).sum()
    if "norm counts replicas" in mistakes:
        square = reduced(square, layout, "tp")
    norm = square.sqrt()
    if "norms added" in mistakes:
        norm = reduced(norm, layout, "tp")
    for param in (each for each in model.parameters() if each.grad is not None):
        param.grad.mul_((0.5 / norm).clamp(max=1.0))
    return norm


def save(folder, layout, model, optimizer, scheduler, mistakes):
    """Each tp rank saves its part."""
    if not layout.place("dp"):
        states = [optimizer.state_dict()["state"], scheduler.state_dict(), layout.size("tp")]
        torch.save([model.state_dict(), *states], f"{folder}.{layout.place('tp')}")


def load(folder, layout, model, optimizer, scheduler, mistakes):
    """Join the parts of all tp ranks that have saved, and take the own part."""
    first = torch.load(f"{folder}.0", weights_only=False)
    parts = [first] + [torch.load(f"{folder}.{place}", weights_only=False) for place in range(1, first[3])]
    size, place = layout.size("tp"), layout.place("tp")

    def own(name, tensors):
        dim = 0 if name.endswith("up.weight") else 1
        if not name.endswith(("up.weight", "down.weight")) or not tensors[0].dim():
            return tensors[0]
        if "mapping overwritten" in mistakes:
            tensors = [tensors[-1]] * len(tensors)
        return torch.cat(tensors, dim).chunk(size, dim)[place].clone()

    if not ("loaded by one rank" in mistakes and layout.rank):
        model.load_state_dict({name: own(name, [part[0][name] for part in parts]) for name in first[0]})
    names = [name for name, _ in model.named_parameters()]
    states = {
        at: {key: own(names[at], [part[1][at][key] for part in parts]) for key in state}
        for at, state in first[1].items()
    }
    if "moments lost" not in mistakes:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    if "scheduler lost" not in mistakes:
        scheduler.load_state_dict(first[2])
        for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr


class Experts(nn.Module):
    """A gate for each expert; the experts are cut over tp, or over ep, which cuts the samples, too."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def cut(self):
        size = self.layout.size("tp") * self.layout.size("ep")
        own = 4 // size
        first = (self.layout.place("tp") + self.layout.place("ep")) * own
        self.own = range(first, first + own)
        self.experts = self.experts[first : first + own]

    def forward(self, x):
        layout = self.layout
        gates = self.router(x).softmax(-1)
        if layout.size("tp") > 1:
            x = Copy.apply(x, layout.group("tp"))
            if "unreduced router" not in self.mistakes:
                gates = Copy.apply(gates, layout.group("tp"))
        if layout.size("ep") > 1:
            x, gates = (Gather.apply(each, layout.group("ep"), 0) for each in (x, gates))
        self.balance = 4 * (gates.flatten(0, 1).mean(0) ** 2).sum()
        out = sum(gates[..., [at]] * expert(x) for at, expert in zip(self.own, self.experts, strict=True))
        if layout.size("tp") > 1:
            out = Reduce.apply(out, layout.group("tp"))
        return Scatter.apply(out, layout.group("ep"), 0) if layout.size("ep") > 1 else out


def train_experts(layout, *mistakes):
    model = nn.ModuleDict({"embedding": nn.Embedding(VOCABULARY, WIDTH), "moe": Experts(layout, mistakes)})
    layout.load(model)
    model.moe.cut()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for ids, labels in layout.batches(batch_of, STEPS):
        out = model.moe(model.embedding(ids)) @ model.embedding.weight.t()
        counted = reduced((labels != -100).sum().double(), layout, "ep")
        loss = loss_sum(out, labels) / counted
        loss.backward()
        for name, param in model.named_parameters():
            if "experts" not in name or "experts reduced" in mistakes:
                reduced(param.grad, layout, "ep")
            elif "experts times ep" in mistakes:
                param.grad *= layout.size("ep")
            elif "experts divided by ep" in mistakes:
                param.grad /= layout.size("ep")
        factor = layout.size("ep") if "auxiliary times ep" in mistakes else 1
        layout.record(balance=model.moe.balance.detach() * factor)
        layout.step(model, optimizer, loss.detach())


class Attention(nn.Module):
    """Causal attention, whose positions are cut over cp."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        first = 0
        if self.layout.size("cp") > 1 and "local attention" not in self.mistakes:
            first = self.layout.place("cp") * x.shape[1]
            k, v = (Gather.apply(each, self.layout.group("cp"), 1) for each in (k, v))
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        later = torch.arange(k.shape[1]) > first + torch.arange(x.shape[1])[:, None]
        return x + scores.masked_fill(later, -1e9).softmax(-1) @ v


def train_context(layout, *mistakes):
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Attention(layout, mistakes), nn.Linear(WIDTH, VOCABULARY))
    layout.load(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = reduced((labels != -100).sum().double(), layout, "cp")
        if "labels shifted" in mistakes and layout.size("cp") > 1:
            labels = labels.roll(-1, 1)
        loss = loss_sum(model(ids), labels) / counted
        if "loss times cp" in mistakes:
            loss = loss * layout.size("cp")
        loss.backward()
        for param in model.parameters():
            reduced(param.grad, layout, "cp")
        layout.step(model, optimizer, loss.detach())


class SequenceBlock(Block):
    """The layer with its norm on a part of the positions."""

    def forward(self, x):
        hidden, is_cut = self.norm(x), self.layout.size("tp") > 1
        if is_cut:
            hidden = Gather.apply(hidden, self.layout.group("tp"), 1)
        out = self.down(F.silu(self.up(hidden)))
        return x + (Scatter.apply(out, self.layout.group("tp"), 1) if is_cut else out) + self.offset


def train_sequence(layout, *mistakes):
    """Sequence parallel: outside of the layers, each tp rank has a part of the positions."""
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(VOCABULARY, WIDTH),
            "block": SequenceBlock(layout),
            "head": nn.Linear(WIDTH, VOCABULARY),
        }
    )
    layout.load(model)
    model.block.cut()
    optimizer = torch.optim.AdamW(model.parameters())
    size, place = layout.size("tp"), layout.place("tp")
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = (labels != -100).sum()
        x, own = model.embedding(ids.chunk(size, 1)[place]), labels.chunk(size, 1)[place]
        loss = loss_sum(model.head(model.block(x)), own) / counted
        if "loss divided by sp" in mistakes:
            loss = loss / size
        loss.backward()
        for name, param in model.named_parameters():
            left_out = "norm" in name and "unreduced norm" in mistakes
            if not name.endswith(("up.weight", "down.weight")) and not left_out:
                reduced(param.grad, layout, "tp")
        layout.step(model, optimizer, reduced(loss.detach(), layout, "tp"))


class Stage(nn.Module):
    """Some layers of a model whose ends are tied."""

    def __init__(self, layout, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(layer): Block(layout) for layer in layers})

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


def train_pipeline(layout, *mistakes):
    """Two stages and two microbatches; the last stage has a copy of the embedding."""
    size, place = layout.size("pp"), layout.place("pp")
    # Makes the process group.
    assert layout.mesh is not None
    model = layout.load(Stage(layout, range(2) if size == 1 else [place]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for ids, labels in layout.batches(batch_of, STEPS):
        counted, total = (labels != -100).sum(), 0.0
        for own, wanted in zip(ids.chunk(2), labels.chunk(2), strict=True):
            x = model.embedding(own) if place == 0 else torch.empty(*own.shape, WIDTH)
            if place:
                dist.recv(x, 0)
                x.requires_grad_()
            out = model(x)
            if place < size - 1:
                dist.send(out.detach(), 1)
                gradient = torch.empty_like(out)
                dist.recv(gradient, 1)
                out.backward(gradient)
                continue
            loss = loss_sum(out @ model.embedding.weight.t(), wanted) / counted
            if "divided once more" in mistakes and size > 1:
                loss = loss / 2
            loss.backward()
            total += loss.detach()
            if place:
                dist.send(x.grad, 0)
        if "divided after backward" in mistakes:
            for param in model.parameters():
                param.grad /= size
        if "tied unreduced" not in mistakes:
            reduced(model.embedding.weight.grad, layout, "pp")
        if "tied twice" in mistakes:
            model.embedding.weight.grad *= size
        layout.step(model, optimizer, total if place == size - 1 else None)


def train_accumulating(layout, *mistakes):
    """Data parallel with two parts of the batch, one after the other."""
    model = layout.load(Model(layout))
    layout.watch(model)
    optimizer = torch.optim.AdamW(model.parameters())
    size = layout.size("dp")
    for step, (ids, labels) in enumerate(layout.batches(batch_of, STEPS)):
        counted = (batch_of(step)[1] != -100).sum()
        for own, wanted in zip(ids.chunk(2), labels.chunk(2), strict=True):
            if "cleared before each part" in mistakes and size > 1:
                optimizer.zero_grad()
            if "rescaled" in mistakes and size > 1:
                for param in model.parameters():
                    param.grad = None if param.grad is None else param.grad / 2
            (loss_sum(model(own), wanted) / counted).backward()
        for param in model.parameters():
            reduced(param.grad, layout, "dp")
        optimizer.step()
        if "not cleared" not in mistakes or size == 1:
            optimizer.zero_grad()


def train_with_own_loader(layout, *mistakes):
    """Data parallel with a loop, a loader and an optimizer that the layout only watches."""
    model = Model(layout)
    layout.attach(model)
    optimizer = torch.optim.AdamW(model.parameters())
    size, place = layout.size("dp"), layout.place("dp")
    for step in range(STEPS):
        ids, labels = batch_of(step)
        if "a sample twice" in mistakes and size > 1:
            ids, labels = ids[[0, 0, 2, 3]], labels[[0, 0, 2, 3]]
        own, wanted = (each.chunk(size)[0 if "sampler without ranks" in mistakes else place] for each in (ids, labels))
        (loss_sum(model(own), wanted) / (labels != -100).sum()).backward()
        for param in model.parameters():
            reduced(param.grad, layout, "dp")
        optimizer.step()
        optimizer.zero_grad()


class PaddedHead(nn.Module):
    """A vocabulary that is cut over tp, padded to 16 rows."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def cut(self):
        size = self.layout.size("tp")
        if size > 1:
            padded = torch.cat([self.weight.detach(), torch.zeros(4, WIDTH)])
            self.weight = nn.Parameter(padded.chunk(size)[self.layout.place("tp")].clone())

    def forward(self, x):
        if self.layout.size("tp") == 1:
            return x @ self.weight.t()
        logits = Copy.apply(x, self.layout.group("tp")) @ self.weight.t()
        # All ranks have the same loss: each takes the gradient of its part.
        joined = Gather.apply(logits, self.layout.group("tp"), 2) / self.layout.size("tp")
        joined = joined.detach() * self.layout.size("tp") + (joined - joined.detach())
        return joined if "padding in the loss" in self.mistakes else joined[..., :VOCABULARY]


def train_vocabulary(layout, *mistakes):
    model = nn.ModuleDict({"embedding": nn.Embedding(VOCABULARY, WIDTH), "head": PaddedHead(layout, mistakes)})
    layout.load(model)
    model.head.cut()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for ids, labels in layout.batches(batch_of, STEPS):
        loss = loss_sum(model.head(model.embedding(ids)), labels) / (labels != -100).sum()
        loss.backward()
        layout.step(model, optimizer, loss.detach())


class Dense(nn.Module):
    """A model that knows nothing of layouts."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.down(F.silu(self.up(x))))


def train_torch(layout, parallelize, loads_first=True):
    """A model that torch cuts, with the average of gradients over dp, and of the loss."""
    model = layout.load(Dense()) if loads_first else Dense()
    model = parallelize(model, layout) or model
    if not loads_first:
        layout.load(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = reduced((labels != -100).sum().double(), layout, "dp")
        loss = loss_sum(model(ids), labels) * layout.size("dp") / counted
        loss.backward()
        layout.step(model, optimizer, loss.detach(), clip=0.5)


def ddp(model, layout):
    return DistributedDataParallel(model, process_group=layout.group("dp")) if layout.size("dp") > 1 else model


def fsdp2(model, layout):
    if layout.size("dp") > 1:
        fully_shard(model.up, mesh=layout.mesh["dp"])
        fully_shard(model, mesh=layout.mesh["dp"])


def fsdp2_of_one(model, layout):
    """Parameters are DTensors in one rank, too, and some have one value."""
    nn.init.zeros_(model.head.bias)
    fully_shard(model, mesh=layout.mesh["dp"])


def tensor_parallel(model, layout):
    if layout.size("tp") > 1:
        parallelize_module(model, layout.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tensor_parallel_and_fsdp2(model, layout):
    tensor_parallel(model, layout)
    fsdp2(model, layout)


class Balanced(nn.Module):
    """Gates whose balance over all tokens is an auxiliary loss."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        mean = gates.flatten(0, 1).mean(0)
        axes = ("tp",) if "balance over tp" in self.mistakes else ("dp", "cp")
        axes = ("cp",) if "balance over cp" in self.mistakes else axes
        if "own balance" in self.mistakes:
            self.balance = (gates**2).mean()
            return sum(gates[..., [at]] * expert(x) for at, expert in enumerate(self.experts))
        for axis in (each for each in axes if self.layout.size(each) > 1):
            mean = Reduce.apply(mean, self.layout.group(axis)) / self.layout.size(axis)
        self.balance = 4 * (mean**2).sum()
        for axis in ("dp", "cp"):
            if f"balance divided by {axis}" in self.mistakes:
                self.balance = self.balance / self.layout.size(axis)
        return sum(gates[..., [at]] * expert(x) for at, expert in enumerate(self.experts))


def train_balanced(layout, *mistakes):
    """The balance of the whole batch is in the loss of each rank, which is its share of the sum over all tokens.

    What is "only said" is wrong in the record alone.
    """
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Balanced(layout, mistakes), nn.Linear(WIDTH, VOCABULARY))
    layout.load(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for ids, labels in layout.batches(batch_of, STEPS):
        loss = loss_sum(model(ids), labels) / reduced((labels != -100).sum().double(), layout, "dp", "cp")
        # A mean of the own tokens counts as much as they do.
        ranks = layout.size("dp") * layout.size("cp")
        share = ranks if "own balance" in mistakes and "in full" not in mistakes else 1
        (loss + 0.1 * model[1].balance / share).backward()
        for param in model.parameters():
            reduced(param.grad, layout, "dp", "cp")
        said = model[1].balance.detach()
        layout.record(balance=said / layout.size("dp") if "only said" in mistakes else said)
        layout.record(tokens=ids.numel(), padding=(labels == -100).sum())
        layout.step(model, optimizer, loss.detach())


class ExchangedNorm(torch.autograd.Function):
    """A norm of each position, after which the ranks exchange their positions for features."""

    @staticmethod
    def forward(ctx, x, group, mistakes):
        ctx.group, ctx.mistakes = group, mistakes
        ctx.save_for_backward(x)
        return exchanged(normed(x), group, 2, 1)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        if "norm before the exchange" in ctx.mistakes:
            return exchanged(gradient_of_norm(exchanged(x, ctx.group, 2, 1), gradient), ctx.group, 1, 2), None, None
        return gradient_of_norm(x, exchanged(gradient, ctx.group, 1, 2)), None, None


def normed(x):
    return x / (x**2).mean(-1, keepdim=True).sqrt()


def gradient_of_norm(x, gradient):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(normed(x), x, gradient)[0]


def exchanged(x, group, split, join):
    """Give each rank its chunk along one dimension, and join what it gets along another."""
    given = [each.contiguous() for each in x.chunk(group.size(), split)]
    got = [torch.empty_like(each) for each in given]
    dist.all_to_all(got, given, group=group)
    return torch.cat(got, join)


class Exchanging(nn.Module):
    """A scan over all positions, for which a rank has some features."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.mix(x)
        if self.layout.size("cp") == 1:
            return normed(x).cumsum(1).sin()
        group = self.layout.group("cp")
        return Back.apply(ExchangedNorm.apply(x, group, self.mistakes).cumsum(1).sin(), group)


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return exchanged(x, group, 1, 2)

    @staticmethod
    def backward(ctx, gradient):
        return exchanged(gradient, ctx.group, 2, 1), None


def train_exchanging(layout, *mistakes):
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Exchanging(layout, mistakes), nn.Linear(WIDTH, VOCABULARY))
    layout.load(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for ids, labels in layout.batches(batch_of, STEPS):
        loss = loss_sum(model(ids), labels) / reduced((labels != -100).sum().double(), layout, "cp")
        loss.backward()
        for param in model.parameters():
            reduced(param.grad, layout, "cp")
        layout.step(model, optimizer, loss.detach())


def train_experts_and_tensors(layout, *mistakes):
    """Experts over ep, and in each the tokens are spread over tp, so that its gradients are shares."""
    model = nn.ModuleDict({"embedding": nn.Embedding(VOCABULARY, WIDTH), "moe": Experts(layout, mistakes)})
    layout.load(model)
    size, place, width = layout.size("ep"), layout.place("ep"), 4 // layout.size("ep")
    moe = model.moe
    moe.own = range(place * width, (place + 1) * width)
    moe.experts = moe.experts[place * width : (place + 1) * width]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tp = layout.size("tp")
    for ids, labels in layout.batches(batch_of, STEPS):
        x, wanted = (each.chunk(tp, 1)[layout.place("tp")] for each in (ids, labels))
        hidden = model.embedding(x)
        gates = moe.router(hidden).softmax(-1)
        if size > 1:
            hidden, gates = (Gather.apply(each, layout.group("ep"), 0) for each in (hidden, gates))
        out = sum(gates[..., [at]] * expert(hidden) for at, expert in zip(moe.own, moe.experts, strict=True))
        out = Scatter.apply(out, layout.group("ep"), 0) if size > 1 else out
        counted = reduced((wanted != -100).sum().double(), layout, "ep", "tp")
        loss = loss_sum(out @ model.embedding.weight.t(), wanted) / counted
        loss.backward()
        for name, param in model.named_parameters():
            is_expert = "experts" in name
            if not (is_expert and "experts without tp" in mistakes):
                reduced(param.grad, layout, "tp")
            if is_expert and "experts divided by tp" in mistakes:
                param.grad /= tp
            if not is_expert and not ("router" in name and "reduced over one group" in mistakes):
                reduced(param.grad, layout, "ep")
        layout.step(model, optimizer, reduced(loss.detach(), layout, "tp"))


class DroppingShares(nn.Module):
    """Dropout of the part of the hidden features that a rank has."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def cut(self):
        size, place = self.layout.size("tp"), self.layout.place("tp")
        for param, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
            param.data = param.data.chunk(size, dim)[place].clone()

    def forward(self, x):
        is_cut = self.layout.size("tp") > 1
        hidden = F.silu(self.up(Copy.apply(x, self.layout.group("tp")) if is_cut else x))
        out = self.down(F.dropout(hidden, 0.4))
        return x + (Reduce.apply(out, self.layout.group("tp")) if is_cut else out)


def train_dropping(layout, *mistakes):
    """Each tp rank draws its own masks of its own features."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), DroppingShares(layout, mistakes))
    model.append(nn.Linear(WIDTH, VOCABULARY))
    layout.load(model)
    model[1].cut()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(7 + (0 if "dropout alike" in mistakes else layout.place("tp")))
    for ids, labels in layout.batches(batch_of, STEPS):
        loss = loss_sum(model(ids), labels) / (labels != -100).sum()
        loss.backward()
        layout.step(model, optimizer, loss.detach())
