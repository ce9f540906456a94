"""Trainings of other models than those of `layout_programs`, with planted mistakes by name."""

import functools

import torch
from layout_programs import STEPS, VOCABULARY, WIDTH, Copy, Dense, Gather, Reduce, batch_of, joined, loss_sum, reduced
from layout_programs_of_torch import DATA, Dispatch, Ring, Transformer as TorchTransformer, ddp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAGRAD = functools.partial(torch.optim.Adagrad, lr=0.1)
RMSPROP = functools.partial(torch.optim.RMSprop, lr=0.01)
NADAM = functools.partial(torch.optim.NAdam, lr=0.01)


def train_sharded(layout, *mistakes, optimizer=SGD):
    """A transformer under FSDP2, HSDP or DDP, whichever axes there are; without clipping."""
    model = layout.load(TorchTransformer())
    ranks = layout.size("dp") * layout.size("dp_replicate") * layout.size("dp_shard")
    if layout.size("dp_shard") > 1 or layout.size("dp_replicate") > 1:
        is_whole = "only sharded" not in mistakes
        fully_shard(model, mesh=layout.mesh["dp_replicate", "dp_shard"] if is_whole else layout.mesh["dp_shard"])
    elif layout.size("dp") > 1:
        ignored = {model.head.weight} if "head is ignored" in mistakes else set()
        fully_shard(model, mesh=layout.mesh["dp"], ignored_params=ignored)
    optimizer = optimizer(model.parameters())
    if "decay times dp" in mistakes:
        optimizer.param_groups[0]["weight_decay"] *= layout.size("dp")
    if "rate times the root of dp" in mistakes:
        optimizer.param_groups[0]["lr"] *= layout.size("dp") ** 0.5
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = reduced((labels != -100).sum().double(), layout, *DATA)
        loss = loss_sum(model(ids), labels) / counted * (1 if "loss is not scaled" in mistakes else ranks)
        if "mean of means" in mistakes:
            loss = loss_sum(model(ids), labels) / (labels != -100).sum()
        loss.backward()
        if "head is ignored, and reduced" in mistakes and ranks > 1:
            reduced(model.head.weight.grad, layout, "dp").div_(ranks)
        layout.step(model, optimizer, loss.detach())


def train_accumulating_ddp(layout, *mistakes):
    """DDP that reduces with the last of three parts of the batch."""
    model = layout.load(TorchTransformer(1))
    parallel = ddp(model, layout) or model
    optimizer = RMSPROP(model.parameters())
    for step, (ids, labels) in enumerate(layout.batches(six_rows, STEPS)):
        counted, total = (six_rows(step)[1] != -100).sum(), 0.0
        for part, (own, wanted) in enumerate(zip(ids.chunk(3), labels.chunk(3), strict=True)):
            if layout.size("dp") > 1:
                parallel.require_backward_grad_sync = part == 2 and "never reduced" not in mistakes
            loss = loss_sum(parallel(own), wanted) * layout.size("dp") / counted
            if "parts by their own counts" in mistakes and layout.size("dp") > 1:
                loss = loss_sum(parallel(own), wanted) / (wanted != -100).sum() / 3
            loss.backward()
            total += loss.detach()
        if "not divided by parts" in mistakes and layout.size("dp") > 1:
            for param in model.parameters():
                param.grad *= 3
        layout.step(model, optimizer, total)


def six_rows(step):
    return tuple(torch.cat(pair)[:6] for pair in zip(batch_of(step), batch_of(step + 100), strict=True))


class Heads(nn.Module):
    """Attention whose heads are cut over tp by hand, with a bias for each head, and a row-parallel bias."""

    def __init__(self, layout, mistakes, heads=4):
        super().__init__()
        self.layout, self.mistakes, self.count = layout, mistakes, heads
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Parameter(torch.randn(heads, 3, 2, WIDTH) / 3)
        self.sinks = nn.Parameter(torch.zeros(heads))
        self.out = nn.Parameter(torch.randn(heads, 2, WIDTH) / 3)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def cut(self):
        size, place = self.layout.size("tp"), self.layout.place("tp")
        for name in ("qkv", "sinks", "out"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach().chunk(size)[place].clone()))

    def forward(self, x):
        group, hidden = self.layout.group("tp") if self.layout.size("tp") > 1 else None, self.norm(x)
        if group is not None:
            hidden = Copy.apply(hidden, group)
        if group is not None and "input reduced twice" in self.mistakes:
            hidden = Copy.apply(hidden, group)
        q, k, v = torch.einsum("blw,hcdw->cbhld", hidden, self.qkv)
        scores = q @ k.transpose(-1, -2) + self.sinks[:, None, None]
        scores = torch.cat([scores, self.sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
        weights = scores.tril(0).softmax(-1)[..., :-1]
        out = torch.einsum("bhld,hdw->blw", weights @ v, self.out)
        if group is None:
            return x + out + self.bias
        if "bias on each rank" in self.mistakes:
            return x + Reduce.apply(out + self.bias, group)
        bias = self.bias.detach() if "bias dropped" in self.mistakes else self.bias
        return x + Reduce.apply(out, group) + bias


class VocabularyEmbedding(nn.Module):
    """Rows of a vocabulary, cut over tp."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def cut(self):
        self.weight = nn.Parameter(self.weight.detach().chunk(self.layout.size("tp"))[self.layout.place("tp")].clone())

    def forward(self, ids):
        if self.layout.size("tp") == 1:
            return self.weight[ids]
        at = ids - len(self.weight) * self.layout.place("tp")
        own = (at >= 0) & (at < len(self.weight))
        found = self.weight[at.clamp(0, len(self.weight) - 1)]
        return Reduce.apply(
            found if "others are not masked" in self.mistakes else found * own[..., None], self.layout.group("tp")
        )


def train_heads(layout, *mistakes, optimizer=ADAGRAD):
    parts = {"embedding": VocabularyEmbedding(layout, mistakes)}
    parts |= {"blocks": nn.ModuleList(Heads(layout, mistakes) for _ in range(2)), "head": nn.Linear(WIDTH, VOCABULARY)}
    model = nn.ModuleDict(parts)
    layout.load(model)
    for part in (model.embedding, *model.blocks):
        part.cut()
    if "bias by rank" in mistakes:
        torch.manual_seed(layout.rank)
        nn.init.normal_(model.blocks[1].bias)
    if "blocks swapped" in mistakes and layout.size("tp") > 1:
        first, second = model.blocks[0].bias, model.blocks[1].bias
        first.data, second.data = second.data.clone(), first.data.clone()
    optimizer = optimizer(model.parameters())
    for ids, labels in layout.batches(batch_of, STEPS):
        x = model.embedding(ids)
        for block in model.blocks:
            x = block(x)
        loss = loss_sum(model.head(x), labels) / reduced((labels != -100).sum().double(), layout, "dp")
        loss.backward()
        for name, param in model.named_parameters():
            reduced(param.grad, layout, "dp")
            if "bias reduced over tp" in mistakes and name == "blocks.1.bias":
                reduced(param.grad, layout, "tp")
            if "sinks reduced over tp" in mistakes and "sinks" in name:
                reduced(param.grad, layout, "tp")
            if "other sign" in mistakes and name == "head.bias" and layout.size("tp") > 1:
                param.grad.neg_()
            if "averaged over tp" in mistakes and name == "blocks.0.qkv":
                param.grad /= layout.size("tp")
        layout.step(model, optimizer, loss.detach(), lambda model: clip_heads(model, layout, mistakes))


def clip_heads(model, layout, mistakes):
    """Clip by the norm of all parts."""
    is_cut = layout.size("tp") > 1
    square, own = 0.0, 0.0
    for name, param in model.named_parameters():
        if param.grad is None:
            continue
        of_this = (param.grad**2).sum()
        if is_cut and "norm omits the bias" in mistakes and name == "head.bias":
            continue
        if is_cut and "norm omits sinks" in mistakes and "sinks" in name:
            continue
        if name.endswith(("qkv", "sinks", "out", "embedding.weight")):
            own += of_this
        else:
            square += of_this
    if "local norm" not in mistakes:
        own = reduced(own, layout, "tp")
    norm = (square + own).sqrt()
    if "norm counts ranks" in mistakes:
        norm = reduced(norm.clone() ** 2, layout, "dp").sqrt()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_((0.5 / norm).clamp(max=1.0))
    return norm


def train_stages(layout, *mistakes, microbatches=4):
    """Torch's 1F1B, clipping by the norm of all stages."""
    size, place = layout.size("pp"), layout.place("pp")
    assert layout.mesh is not None
    if size == 1:
        model = TorchTransformer(4)
    else:
        own = range(4 * place // size, 4 * (place + 1) // size)
        model = TorchTransformer(own, first=place == 0, last=place == size - 1)
    layout.load(model)
    if "layers swapped" in mistakes and place == 0 and size > 1:
        first, second = model.layers["0"].w1.weight, model.layers["1"].w1.weight
        first.data, second.data = second.data.clone(), first.data.clone()
    optimizer = SGD(model.parameters())
    for step, (ids, labels) in enumerate(layout.batches(batch_of, STEPS)):
        counted, losses = (labels != -100).sum(), []

        def loss_of(logits, labels, counted=counted):
            return loss_sum(logits, labels) / counted

        if size == 1:
            for own, wanted in zip(ids.chunk(microbatches), labels.chunk(microbatches), strict=True):
                losses.append(loss_of(model(own), wanted))
                losses[-1].backward()
        else:
            if step == 0:
                stage = PipelineStage(model, place, size, torch.device("cpu"), group=layout.group("pp"))
            scales = "torch scales" in mistakes
            run = Schedule1F1B(stage, microbatches, loss_fn=loss_of, scale_grads=scales)
            run._stages_initialized = run._stages_forward_initialized = False
            given = (ids,) if place == 0 else ()
            run.step(*given, **({"target": labels, "losses": losses} if place == size - 1 else {}))
        if "divided by stages" in mistakes:
            for param in model.parameters():
                param.grad /= size
        if "first stage times microbatches" in mistakes and size > 1 and place == 0:
            for param in model.parameters():
                param.grad *= microbatches
        loss = torch.stack([each.detach() for each in losses]).sum() if losses else None
        layout.step(model, optimizer, loss, lambda model: clip_stages(model, layout, mistakes))


def clip_stages(model, layout, mistakes):
    square = torch.stack([(param.grad**2).sum() for param in model.parameters()]).sum()
    norm = (square if "norm of a stage" in mistakes else reduced(square, layout, "pp")).sqrt()
    for param in model.parameters():
        param.grad.mul_((0.5 / norm).clamp(max=1.0))
    return norm


class Positions(nn.Module):
    """Ring attention after an embedding of tokens and positions."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(6, WIDTH)
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        place, size = self.layout.place("cp"), self.layout.size("cp")
        at = torch.arange(ids.shape[1]) + (0 if "positions from 0" in self.mistakes else place * ids.shape[1])
        x = self.tokens(ids) + self.positions(at)
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if size > 1:
            out = Ring.apply(q, k.detach() if "keys cut off" in self.mistakes else k, v, self.layout.group("cp"))
        else:
            later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            out = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.head(x + out)


class Neighbours(torch.autograd.Function):
    """Adds a position of the neighbours over cp before and after those of a rank."""

    @staticmethod
    def forward(ctx, x, group, mistakes):
        ctx.group, ctx.mistakes, place, last = group, mistakes, group.rank(), group.size() - 1
        first, final = (joined(each, group, 1) for each in (x[:, :1], x[:, -1:]))
        before, after = final[:, [place - 1]], first[:, [(place + 1) % group.size()]]
        if "around" not in mistakes:
            before, after = before * (place > 0), after * (place < last)
        return torch.cat([before, x, after], 1)

    @staticmethod
    def backward(ctx, gradient):
        own, place = gradient[:, 1:-1].clone(), ctx.group.rank()
        before, after = (joined(each, ctx.group, 1) for each in (gradient[:, :1], gradient[:, -1:]))
        if place < ctx.group.size() - 1 and "no way back" not in ctx.mistakes:
            own[:, -1] += before[:, place + 1]
        if place and "no way back" not in ctx.mistakes:
            own[:, 0] += after[:, place - 1]
        return own, None, None


class Smoothed(nn.Module):
    """Each position is mixed with those beside it."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.weight = nn.Parameter(torch.randn(3, WIDTH) / 2)

    def forward(self, x):
        if self.layout.size("cp") > 1 and "own positions" not in self.mistakes:
            wide = Neighbours.apply(x, self.layout.group("cp"), self.mistakes)
        else:
            wide = nn.functional.pad(x, (0, 0, 1, 1))
        return sum(wide[:, at : at + x.shape[1]] * weight for at, weight in enumerate(self.weight))


class Sorted(nn.Module):
    """Two experts, each with its tokens one after the other."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        chosen = (tokens[:, 0] > 0).long()
        order, first = chosen.argsort(stable=True), int((chosen == 0).sum())
        tokens = tokens[order]
        out = torch.cat([self.experts[0](tokens[:first]), self.experts[1](tokens[first:])])
        is_wrong = "put back otherwise" in self.mistakes and self.layout.size("dp") > 1
        return out[order if is_wrong else order.argsort()].view_as(x)


def train_mixing(layout, *mistakes, mixer=Smoothed):
    """Data and context parallel, with a layer whose mixer knows of layouts."""
    mixed = mixer(layout, mistakes)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), mixed, nn.Tanh())
    layout.load(model.append(nn.Linear(WIDTH, VOCABULARY)))
    optimizer = SGD(model.parameters())
    for ids, labels in layout.batches(batch_of, STEPS):
        loss = loss_sum(model(ids), labels) / reduced((labels != -100).sum().double(), layout, "dp", "cp")
        loss.backward()
        for param in model.parameters():
            reduced(param.grad, layout, "dp", "cp")
        layout.step(model, optimizer, loss.detach())


train_sorting = functools.partial(train_mixing, mixer=Sorted)


def train_positions(layout, *mistakes, optimizer=NADAM):
    """Data and context parallel, with an auxiliary loss of the logits."""
    model = layout.load(Positions(layout, mistakes))
    optimizer = optimizer(model.parameters())
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = reduced((labels != -100).sum().double(), layout, "dp", "cp")
        logits = model(ids)
        own = logits.logsumexp(-1).square().sum()
        z = reduced(own.detach().clone(), layout, "dp", "cp")
        if "z divided by cp" in mistakes:
            z = z / layout.size("cp")
        (loss_sum(logits, labels) / counted + 1e-3 * own).backward()
        for name, param in model.named_parameters():
            axes = ("dp",) if "head bias over dp alone" in mistakes and name == "head.bias" else ("dp", "cp")
            reduced(param.grad, layout, *axes)
            if "averaged over cp" in mistakes:
                param.grad /= layout.size("cp")
        loss = loss_sum(logits, labels) / counted
        layout.record(z=z)
        layout.step(model, optimizer, loss.detach())


def train_dispatching(layout, *mistakes):
    """Experts as one tensor, cut over ep, which cuts the samples, too."""
    parts = {"embedding": nn.Embedding(VOCABULARY, WIDTH), "moe": Dispatch(layout)}
    model = nn.ModuleDict({**parts, "head": nn.Linear(WIDTH, VOCABULARY)})
    layout.load(model)
    model.moe.cut()
    optimizer = SGD(model.parameters())
    size = layout.size("ep")
    for ids, labels in layout.batches(batch_of, STEPS):
        loss = loss_sum(model.head(model.moe(model.embedding(ids))), labels)
        loss = loss / reduced((labels != -100).sum().double(), layout, "dp", "ep")
        loss.backward()
        for name, param in model.named_parameters():
            is_expert = "w1" in name or "w2" in name
            if not ("router" in name and "router over ep alone" in mistakes):
                reduced(param.grad, layout, "dp")
            if not is_expert or "experts reduced" in mistakes:
                reduced(param.grad, layout, "ep")
            if is_expert and "experts times ep twice" in mistakes:
                param.grad *= size**2
            if is_expert and "experts by the root of ep" in mistakes:
                param.grad /= size**0.5
        layout.step(model, optimizer, loss.detach())


class OwnNorm(nn.Module):
    """Batch norm with statistics of all samples, or by mistake of those of a rank."""

    def __init__(self, layout, mistakes):
        super().__init__()
        self.layout, self.mistakes = layout, mistakes
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        whole = x
        if self.layout.size("dp") > 1 and "own statistics" not in self.mistakes:
            whole = Gather.apply(x, self.layout.group("dp"), 0)
        mean, variance = whole.mean((0, 1)), whole.var((0, 1))
        with torch.no_grad():
            self.batches += 1
            self.mean.lerp_(x.mean((0, 1)) if "own running mean" in self.mistakes else mean, 0.1)
        return (x - mean) / (variance + 1e-5).sqrt() * self.weight + self.bias


def train_normalised(layout, *mistakes):
    """Data parallel, with a generator that draws the samples of a step, saved and continued."""
    norm = OwnNorm(layout, mistakes)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, VOCABULARY))
    layout.load(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids, labels = (torch.cat(each) for each in zip(*map(batch_of, range(5)), strict=True))
    loader = torch.Generator().manual_seed(3)

    def save(folder):
        if layout.rank == 0:
            torch.save([model.state_dict(), loader.get_state()], f"{folder}.pt")

    def load(folder):
        state, drawn = torch.load(f"{folder}.pt")
        model.load_state_dict(state)
        if "generator not restored" not in mistakes:
            loader.set_state(drawn)

    layout.checkpoint(save, load)

    def draw(step):
        chosen = torch.randperm(len(ids), generator=loader)[:4]
        return ids[chosen], labels[chosen]

    for own, wanted in layout.batches(draw, 3):
        counted = reduced((wanted != -100).sum().double(), layout, "dp")
        loss = loss_sum(model(own), wanted) / counted
        loss.backward()
        for param in model.parameters():
            reduced(param.grad, layout, "dp")
        layout.step(model, optimizer, loss.detach())


def train_watched(layout, *mistakes):
    """Data parallel with a loop of its own, two optimizers and torch's clipping, saved and continued."""
    model = Dense()
    layout.attach(model)
    ends = [*model.embedding.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.Adam(ends, 0.01), SGD([*model.up.parameters(), *model.down.parameters()])]
    done = [0]

    def save(folder):
        if layout.rank == 0:
            torch.save([model.state_dict(), [each.state_dict() for each in optimizers], done[0]], f"{folder}.pt")

    def load(folder):
        state, states, done[0] = torch.load(f"{folder}.pt")
        model.load_state_dict(state)
        if "moments of the head lost" in mistakes:
            del states[0]["state"][1]
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    layout.checkpoint(save, load)
    while done[0] < layout.steps(3):
        ids, labels = batch_of(done[0])
        size, place = layout.size("dp"), layout.place("dp")
        (loss_sum(model(ids.chunk(size)[place]), labels.chunk(size)[place]) / (labels != -100).sum()).backward()
        for param in model.parameters():
            reduced(param.grad, layout, "dp")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done[0] += 1
