"""Trainers with fused attention, routed experts, flat buckets and stages, with planted mistakes by name."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layout_programs import STEPS, VOCABULARY, WIDTH, Copy, Gather, Model, Reduce, batch_of, loss_sum, reduced
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

HEADS, EXPERTS = 4, 4


def rotated(x, first):
    """Rotary positions, from `first` on."""
    angle = (torch.arange(x.shape[1], dtype=torch.float64) + first)[:, None, None]
    one, two = x[..., 0::2], x[..., 1::2]
    return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1)


class FusedAttention(nn.Module):
    """Attention with one weight for queries, keys and values, and a norm of whole queries. Cut over tp and cp."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_scale = nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def cut(self):
        size, place = self.layout.size("tp"), self.layout.place("tp")
        whole = self.qkv.weight.detach()
        own = whole.unflatten(0, (3, -1)).chunk(size, 1)[place].flatten(0, 1)
        if "fused weight in chunks" in self.mistakes:
            own = whole.chunk(size)[place]
        self.qkv.weight = nn.Parameter(own.clone())
        self.q_scale = nn.Parameter(self.q_scale.detach().chunk(size)[place].clone())
        self.out.weight = nn.Parameter(self.out.weight.detach().chunk(size, 1)[place].clone())
        if size > 1 and "frozen by the cut" in self.mistakes:
            self.q_scale.requires_grad_(False)

    def forward(self, x):
        layout, hidden = self.layout, self.norm(x)
        if layout.size("tp") > 1:
            hidden = Copy.apply(hidden, layout.group("tp"))
        q, k, v = self.qkv(hidden).chunk(3, -1)
        q = q * self.scale_of(q) * self.q_scale
        first = layout.place("cp") * x.shape[1]
        begin = 0 if "rotated from 0" in self.mistakes else first
        q, k, v = (each.unflatten(-1, (-1, WIDTH // HEADS)) for each in (q, k, v))
        q, k = rotated(q, begin), rotated(k, begin)
        if layout.size("cp") > 1:
            k, v = (Gather.apply(each, layout.group("cp"), 1) for each in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        later = torch.arange(k.shape[1]) > first + torch.arange(x.shape[1])[:, None]
        out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(later, -1e9).softmax(-1), v)
        out = self.out(out.flatten(2))
        return x + (Reduce.apply(out, layout.group("tp")) if layout.size("tp") > 1 else out)

    def scale_of(self, q):
        square = (q**2).sum(-1, keepdim=True)
        if self.layout.size("tp") > 1 and "norm of own heads" in self.mistakes:
            return (square / q.shape[-1] + 1e-6).rsqrt()
        if self.layout.size("tp") > 1:
            group = self.layout.group("tp")
            square = Copy.apply(Reduce.apply(square, group), group)
        return (square / WIDTH + 1e-6).rsqrt()


class Routed(nn.Module):
    """Experts that take a limited number of tokens, with a bias that balances them. Cut over tp."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 3)
        self.register_buffer("expert_bias", torch.zeros(EXPERTS, dtype=torch.float64))

    def cut(self):
        size, place = self.layout.size("tp"), self.layout.place("tp")
        self.up = nn.Parameter(self.up.detach().chunk(size, 2)[place].clone())
        self.down = nn.Parameter(self.down.detach().chunk(size, 1)[place].clone())

    def forward(self, x):
        layout, hidden = self.layout, self.norm(x)
        gates = self.router(hidden).softmax(-1)
        self.balance = (gates**2).sum()
        if layout.size("tp") > 1:
            hidden, gates = (Copy.apply(each, layout.group("tp")) for each in (hidden, gates))
            if "balance behind the copy" in self.mistakes:
                self.balance = (gates**2).sum()
        chosen = F.one_hot((gates + self.expert_bias).argmax(-1), EXPERTS).to(gates)
        kept = chosen if "unlimited" in self.mistakes else chosen * self.fits(chosen)
        self.counts = chosen.flatten(0, 1).sum(0).detach()
        out = torch.einsum("blw,ewh,ehv->blev", hidden, self.up, self.down)
        out = (out * (kept * gates)[..., None]).sum(2)
        return x + (Reduce.apply(out, layout.group("tp")) if layout.size("tp") > 1 else out)

    def fits(self, chosen):
        """Whether an expert has room for a token: tokens of the whole batch come in the order of ranks."""
        counts, before = chosen.flatten(0, 1).sum(0), torch.zeros(EXPERTS).to(chosen)
        size = self.layout.size("dp")
        total = chosen.shape[0] * chosen.shape[1]
        if size > 1 and "capacity of own tokens" not in self.mistakes:
            all_counts = [torch.empty_like(counts) for _ in range(size)]
            dist.all_gather(all_counts, counts, group=self.layout.group("dp"))
            before = sum(all_counts[: self.layout.place("dp")], before)
            total *= size
        at = before + chosen.flatten(0, 1).cumsum(0) - 1
        return (at < total / EXPERTS * 1.25).to(chosen).unflatten(0, chosen.shape[:2])

    def balances(self):
        counts = self.counts
        if "bias by own counts" not in self.mistakes:
            counts = reduced(counts.clone(), self.layout, "dp", "cp")
        self.expert_bias += 0.01 * (counts.mean() - counts).sign()


class Routing(nn.Module):
    def __init__(self, layout, mistakes):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention, self.experts = FusedAttention(layout, mistakes), Routed(layout, mistakes)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.attention(self.experts(self.embedding(ids)))))


def train_routing(layout, *mistakes):
    """A tied transformer of one block over dp, tp and cp: decay of matrices alone, and a loss that balances experts."""
    model = layout.load(Routing(layout, mistakes))
    optimizer = adamw(model, layout, mistakes) if "optimizer before the cut" in mistakes else None
    model.attention.cut()
    model.experts.cut()
    if layout.size("tp") > 1 and "tie broken" in mistakes:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    optimizer = optimizer or adamw(model, layout, mistakes)
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = reduced((labels != -100).sum().double(), layout, "dp", "cp")
        if layout.size("dp") > 1 and "padding counts" in mistakes:
            counted = labels.numel() * layout.size("dp")
        if layout.size("dp") > 1 and "labels of another rank" in mistakes:
            dist.all_reduce(labels, op=dist.ReduceOp.MAX, group=layout.group("dp"))
        loss = loss_sum(model(ids), labels) / counted
        (loss + 0.01 * model.experts.balance).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        if layout.size("dp") > 1 and "largest gradient" in mistakes:
            for grad in grads:
                dist.all_reduce(grad, op=dist.ReduceOp.MAX, group=layout.group("dp"))
        else:
            reduce_flat(grads, layout, mistakes)
        layout.step(model, optimizer, loss.detach())
        model.experts.balances()


def adamw(model, layout, mistakes):
    decays = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() <= 1]
    is_wrong = "norms decay" in mistakes and layout.size("dp") > 1
    groups = [{"params": decays}, {"params": rest, "weight_decay": 0.1 if is_wrong else 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def reduce_flat(grads, layout, mistakes):
    """One reduction of all gradients, as buckets do it."""
    flat = torch.cat([grad.flatten() for grad in grads])
    reduced(flat, layout, "dp", "cp")
    at = 0
    is_reversed = "bucket in reverse" in mistakes and layout.size("dp") > 1
    for number, grad in enumerate(reversed(grads) if is_reversed else grads):
        is_off = "bucket off by one" in mistakes and number == 3 and layout.size("dp") > 1
        grad.copy_(flat[at + is_off : at + is_off + grad.numel()].view_as(grad))
        at += grad.numel()


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.down(F.silu(self.up(self.norm(x)))))


class OwnColumns(nn.Module):
    """A gated part in plain tensors between DTensors, as fused kernels need it."""

    def __init__(self, mesh, mistakes):
        super().__init__()
        self.mesh, self.mistakes = mesh, mistakes

    def apply_to(self, hidden, up, bias, down):
        placements = [Replicate()] if "no grad_placements" in self.mistakes else [Partial()]
        own = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        own = own.to_local(grad_placements=placements)
        out = F.silu(own @ up.to_local().t() + bias.to_local()) @ down.to_local().t()
        return DTensor.from_local(out, self.mesh, [Partial()], run_check=False).full_tensor()


class LocalDense(Dense):
    """The layers as DTensors over tp, which a part of the model takes as plain tensors."""

    def cut(self, layout, mistakes):
        self.mesh = layout.mesh["tp"]
        self.part = OwnColumns(self.mesh, mistakes)
        for layer, name, placement in (
            (self.up, "weight", Shard(0)),
            (self.up, "bias", Shard(0)),
            (self.down, "weight", Shard(1)),
        ):
            param = distribute_tensor(getattr(layer, name).detach(), self.mesh, [placement])
            setattr(layer, name, nn.Parameter(param))

    def forward(self, ids):
        if not hasattr(self, "part"):
            return super().forward(ids)
        x = self.embedding(ids)
        out = self.part.apply_to(self.norm(x), self.up.weight, self.up.bias, self.down.weight)
        return self.head(x + out + self.down.bias)


def train_local(layout, *mistakes):
    model = layout.load(LocalDense())
    if layout.size("tp") > 1:
        model.cut(layout, mistakes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for ids, labels in layout.batches(batch_of, STEPS):
        loss = loss_sum(model(ids), labels) / (labels != -100).sum()
        loss.backward()
        layout.step(model, optimizer, loss.detach())


def train_accumulating_sharded(layout, *mistakes):
    """FSDP2 that reduces with the last of two parts of the batch."""
    model = layout.load(Dense())
    size = layout.size("dp")
    if size > 1:
        fully_shard(model, mesh=layout.mesh["dp"])
        model.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = reduced((labels != -100).sum().double(), layout, "dp")
        total = 0.0
        for part, (own, wanted) in enumerate(zip(ids.chunk(2), labels.chunk(2), strict=True)):
            if size > 1:
                model.set_requires_gradient_sync(part == 1 or "reduced twice" in mistakes)
                model.set_is_last_backward(part == 1)
            loss = loss_sum(model(own), wanted) / counted
            loss.backward()
            total += loss.detach()
        if "only the last loss" in mistakes and size > 1:
            total = loss.detach()
        layout.step(model, optimizer, total)


def train_in_parts(layout, *mistakes):
    """Two parts of the batch, whose gradients one reduction sums at the end; each rank keeps some of the states."""
    model = layout.load(Dense())
    size = layout.size("dp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for ids, labels in layout.batches(batch_of, STEPS):
        counted, total = reduced((labels != -100).sum().double(), layout, "dp"), 0.0
        for own, wanted in zip(ids.chunk(2), labels.chunk(2), strict=True):
            loss = loss_sum(model(own), wanted) / counted
            loss.backward()
            total += loss.detach()
            if "reduced after each part" in mistakes:
                for param in model.parameters():
                    reduced(param.grad, layout, "dp")
        for param in model.parameters() if "reduced after each part" not in mistakes else ():
            if size > 1 and "largest gradient" in mistakes:
                dist.all_reduce(param.grad, op=dist.ReduceOp.MAX, group=layout.group("dp"))
            else:
                reduced(param.grad, layout, "dp")
        layout.step(model, optimizer, total, scheduler=Owners(model, layout, mistakes))


class Owners:
    """After a step each rank sends the parameters that it owns to the others."""

    def __init__(self, model, layout, mistakes):
        self.before = [param.detach().clone() for param in model.parameters()]
        self.model, self.layout, self.mistakes = model, layout, mistakes

    def step(self):
        size, place = self.layout.size("dp"), self.layout.place("dp")
        for at, (param, before) in enumerate(zip(self.model.parameters(), self.before, strict=True)):
            if at % size != place:
                param.data.copy_(before)
            is_last = at == len(self.before) - 1
            if size > 1 and not (is_last and "last parameter not sent" in self.mistakes):
                dist.broadcast(param.data, group_src=at % size, group=self.layout.group("dp"))


def train_loading(layout, *mistakes):
    """Data and tensor parallel with an own loader, which asks for its place."""
    model = Model(layout)
    layout.attach(model)
    model.cut()
    optimizer = torch.optim.AdamW(model.parameters())
    size, place = layout.size("dp"), layout.place("dp")
    if "place by rank" in mistakes:
        place = layout.rank % size
    for step in range(STEPS):
        ids, labels = batch_of(step)
        own, wanted = ids.chunk(size)[place], labels.chunk(size)[place]
        (loss_sum(model(own), wanted) / (labels != -100).sum()).backward()
        for param in model.parameters():
            reduced(param.grad, layout, "dp")
        optimizer.step()
        optimizer.zero_grad()


class Half(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if 0 in layers else None
        self.layers = nn.ModuleDict({str(layer): nn.Linear(WIDTH, WIDTH) for layer in layers})
        self.head = nn.Linear(WIDTH, VOCABULARY) if 1 in layers else None

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = x + layer(x).tanh()
        return x if self.head is None else self.head(x)


def train_halves(layout, *mistakes):
    """Two stages by hand: all forwards first, then all backwards in the reverse order."""
    size, place = layout.size("pp"), layout.place("pp")
    assert layout.mesh is not None
    model = layout.load(Half([0, 1] if size == 1 else [place]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for ids, labels in layout.batches(batch_of, STEPS):
        counted, total, outs = (labels != -100).sum(), 0.0, []
        parts = list(zip(ids.chunk(2), labels.chunk(2), strict=True))
        if "labels in another order" in mistakes and size > 1:
            parts = [(own, wanted) for (own, _), (_, wanted) in zip(parts, reversed(parts), strict=True)]
        for own, wanted in parts:
            x = own
            if place:
                x = torch.empty(*own.shape, WIDTH)
                dist.recv(x, 0)
                x.requires_grad_()
            out = model(x)
            if place < size - 1:
                dist.send(out.detach(), 1)
            else:
                loss = loss_sum(out, wanted) / counted
                total, out = total + loss.detach(), loss
            outs.append((x, out))
        for number, (x, out) in reversed(list(enumerate(outs))):
            if place < size - 1:
                gradient = torch.empty_like(out)
                dist.recv(gradient, 1)
                if "first part lost" in mistakes and number == 0:
                    gradient.zero_()
                out.backward(gradient)
            else:
                out.backward()
                if place:
                    dist.send(x.grad, 0)
        layout.step(model, optimizer, total if place == size - 1 else None)
