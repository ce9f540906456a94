"""Sound trainings for tests of layouts: what torch has for parallel training, and what trainers write by hand."""

import functools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from layout_programs import STEPS, VOCABULARY, WIDTH, Copy, Dense, Reduce, batch_of, loss_sum, reduced
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

DATA = ("dp", "dp_replicate", "dp_shard")


class Layer(nn.Module):
    """Causal attention with heads, and a gated layer."""

    def __init__(self, dropout=0.0, checkpointed=False):
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout, self.checkpointed = dropout, checkpointed

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpointed else self.compute(x)

    def compute(self, x):
        x = x + self.attend(self.norm(x))
        hidden = self.norm2(x)
        out = self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))
        return x + F.dropout(out, self.dropout, self.training)

    def attend(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class Transformer(nn.Module):
    def __init__(self, layers=2, tied=False, first=True, last=True, **of_layers):
        super().__init__()
        layers = range(layers) if isinstance(layers, int) else layers
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.layers = nn.ModuleDict({str(layer): Layer(**of_layers) for layer in layers})
        self.norm = nn.RMSNorm(WIDTH) if last else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def train(layout, parallelize=lambda model, layout: None, model=Transformer, optimizer=torch.optim.AdamW, clip=0.5):
    """A model that torch cuts; gradients are averaged over the axes of data."""
    model = layout.load(model())
    parallel = parallelize(model, layout)
    model = model if parallel is None else parallel
    optimizer = optimizer(model.parameters())
    ranks = [layout.size(axis) for axis in DATA]
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = reduced((labels != -100).sum().double(), layout, *DATA)
        loss = loss_sum(model(ids), labels) * ranks[0] * ranks[1] * ranks[2] / counted
        loss.backward()
        layout.step(model, optimizer, loss.detach(), clip=clip)


def torch_clip(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def ddp(model, layout):
    if layout.size("dp") > 1:
        return DistributedDataParallel(model, process_group=layout.group("dp"))


def hsdp(model, layout):
    if layout.size("dp_shard") > 1 or layout.size("dp_replicate") > 1:
        mesh = layout.mesh["dp_replicate", "dp_shard"]
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


def fsdp2(model, layout, **options):
    if layout.size("dp") > 1:
        for layer in model.layers.values():
            fully_shard(layer, mesh=layout.mesh["dp"], **options)
        fully_shard(model, mesh=layout.mesh["dp"], **options)


def fsdp1(model, layout):
    if layout.size("dp") > 1:
        return FullyShardedDataParallel(
            model, process_group=layout.group("dp"), use_orig_params=True, device_id=torch.device("cpu")
        )


def compiled(model, layout):
    for layer in model.layers.values():
        layer.compile(backend="aot_eager")
    return ddp(model, layout)


def compiled_whole(model, layout):
    """The model with its DDP; the reference is not compiled."""
    if layout.size("dp") > 1:
        return torch.compile(ddp(model, layout), backend="aot_eager")


def tensor_parallel(model, layout):
    """The plan of torch's tutorial, without sequence parallel."""
    if layout.size("tp") > 1:
        mesh = layout.mesh["tp"]
        rows, columns = RowwiseParallel, ColwiseParallel
        plan = {name: columns() for name in ("wq", "wk", "wv", "w1", "w3")} | {name: rows() for name in ("wo", "w2")}
        for layer in model.layers.values():
            parallelize_module(layer, mesh, plan)
        ends = {"embedding": rows(input_layouts=Replicate()), "head": columns(output_layouts=Replicate())}
        parallelize_module(model, mesh, ends)


def sequence_parallel(model, layout):
    """The plan of torch's tutorial, with sequence parallel."""
    if layout.size("tp") > 1:
        mesh, sequence = layout.mesh["tp"], Shard(1)
        columns = {name: ColwiseParallel() for name in ("wq", "wk", "wv", "w1", "w3")}
        rows = {name: RowwiseParallel(output_layouts=sequence) for name in ("wo", "w2")}
        gather = functools.partial(SequenceParallel)
        for layer in model.layers.values():
            layer.norm2 = Gathered(layer.norm2)
            layer.norm = Gathered(layer.norm)
            into = {
                name: PrepareModuleInput(input_layouts=sequence, desired_input_layouts=Replicate())
                for name in ("norm.after", "norm2.after")
            }
            parallelize_module(layer, mesh, columns | rows | into | {"norm.norm": gather(), "norm2.norm": gather()})
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
            "norm": gather(),
            "head": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)


class Gathered(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.after = norm, nn.Identity()

    def forward(self, x):
        return self.after(self.norm(x))


def tensor_parallel_and_fsdp2(model, layout):
    tensor_parallel(model, layout)
    fsdp2(model, layout)


def zero(layout):
    """DDP with an optimizer whose states are spread over the ranks."""
    model = layout.load(Dense())
    is_spread = layout.size("dp") > 1
    if is_spread:
        model = DistributedDataParallel(model, process_group=layout.group("dp"))
    layout.watch(model)
    optimizer = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        if is_spread
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = reduced((labels != -100).sum().double(), layout, "dp")
        (loss_sum(model(ids), labels) * layout.size("dp") / counted).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_accumulating(layout):
    model = layout.load(Transformer(1))
    parallel = ddp(model, layout) or model
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for step, (ids, labels) in enumerate(layout.batches(batch_of, STEPS)):
        counted, total = (batch_of(step)[1] != -100).sum(), 0.0
        for part, (own, wanted) in enumerate(zip(ids.chunk(2), labels.chunk(2), strict=True)):
            if hasattr(parallel, "require_backward_grad_sync"):
                parallel.require_backward_grad_sync = part == 1
            loss = loss_sum(parallel(own), wanted) * layout.size("dp") / counted
            loss.backward()
            total += loss.detach()
        layout.step(model, optimizer, total, clip=torch_clip)


def pipeline(layout, schedule=Schedule1F1B, stages=1, microbatches=4, tied=False, clip=None):
    """Torch's schedules; with several stages in a rank they are interleaved."""
    size, place = layout.size("pp"), layout.place("pp")
    layers = 4
    count = size * stages
    models, at = [], range(count) if size == 1 else range(place, count, size)
    assert layout.mesh is not None
    if size == 1:
        models = [Transformer(layers)]
        if tied:
            models[0].head.weight = models[0].embedding.weight
    else:
        for stage in at:
            own = range(layers * stage // count, layers * (stage + 1) // count)
            models.append(Transformer(own, first=stage == 0, last=stage == count - 1))
    name = (lambda name: name.replace("head", "embedding")) if tied else None
    layout.load(models, name)
    optimizer = torch.optim.AdamW([param for model in models for param in model.parameters()])
    for step, (ids, labels) in enumerate(layout.batches(batch_of, STEPS)):
        counted = (labels != -100).sum()

        def loss_of(logits, labels, counted=counted):
            return loss_sum(logits, labels) / counted

        losses = []
        if size == 1:
            for own, wanted in zip(ids.chunk(microbatches), labels.chunk(microbatches), strict=True):
                losses.append(loss_of(models[0](own), wanted))
                losses[-1].backward()
        else:
            if step == 0:
                parts = [
                    PipelineStage(model, stage, count, torch.device("cpu"), group=layout.group("pp"))
                    for model, stage in zip(models, at, strict=True)
                ]
            run = schedule(parts if stages > 1 else parts[0], microbatches, loss_fn=loss_of, scale_grads=False)
            run._stages_initialized = run._stages_forward_initialized = False
            given = (ids,) if place == 0 else ()
            run.step(*given, **({"target": labels, "losses": losses} if place == size - 1 else {}))
            if tied:
                ends = [m for m in models if m.embedding is not None] + [m for m in models if m.head is not None]
                for model in ends:
                    dist.all_reduce((model.embedding or model.head).weight.grad, group=layout.group("pp"))
        loss = torch.stack([each.detach() for each in losses]).sum() if losses else None
        layout.step(models, optimizer, loss, clip=clip)


class Ring(torch.autograd.Function):
    """Causal attention whose keys and values go round a ring."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        size, place, length = group.size(), group.rank(), q.shape[1]
        scores, values = [], []
        for turn in range(size):
            owner = (place - turn) % size
            later = torch.arange(length) + owner * length > place * length + torch.arange(length)[:, None]
            scores.append((q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf))
            values.append(v)
            if turn < size - 1:
                k, v = (ring_shift(each, group) for each in (k, v))
        weights = torch.cat(scores, -1).softmax(-1)
        ctx.save_for_backward(q, k, weights, *values)
        ctx.group = group
        return weights @ torch.cat(values, 1)

    @staticmethod
    def backward(ctx, gradient):
        q, k, weights, *values = ctx.saved_tensors
        group, size = ctx.group, ctx.group.size()
        of_weights = gradient @ torch.cat(values, 1).transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        of_q, of_k, of_v = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(q)
        # The last keys that came are here; gradients go on with them, until they are at home.
        for turn in reversed(range(size)):
            part = slice(turn * q.shape[1], (turn + 1) * q.shape[1])
            of_q += of_scores[:, :, part] @ k
            of_k += of_scores[:, :, part].transpose(1, 2) @ q
            of_v += weights[:, :, part].transpose(1, 2) @ gradient
            if turn:
                k, of_k, of_v = (ring_shift(each, group, -1) for each in (k, of_k, of_v))
        return of_q, of_k, of_v, None


def ring_shift(tensor, group, by=1):
    size, place = group.size(), group.rank()
    received = torch.empty_like(tensor.contiguous())
    to, source = (dist.get_global_rank(group, (place + each) % size) for each in (by, -by))
    ops = [dist.P2POp(dist.isend, tensor.contiguous(), to, group), dist.P2POp(dist.irecv, received, source, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


class RingLayer(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.layout.size("cp") > 1:
            return x + self.wo(Ring.apply(q, k, v, self.layout.group("cp")))
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(later, -torch.inf)
        return x + self.wo(scores.softmax(-1) @ v)


def ring(layout):
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), RingLayer(layout), nn.Linear(WIDTH, VOCABULARY))
    layout.load(model)
    optimizer = torch.optim.AdamW(model.parameters())
    axes = ("dp", "cp")
    for ids, labels in layout.batches(batch_of, STEPS):
        loss = loss_sum(model(ids), labels) / reduced((labels != -100).sum().double(), layout, *axes)
        loss.backward()
        for param in model.parameters():
            reduced(param.grad, layout, *axes)
        layout.step(model, optimizer, loss.detach(), clip=torch_clip)


class SynchronisedNorm(nn.Module):
    """Batch norm with statistics of all samples, by collectives that autograd knows."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def average(self, x):
        mean = x.mean((0, 1))
        if self.layout.size("dp") == 1:
            return mean
        return differentiable.all_reduce(mean, group=self.layout.group("dp")) / self.layout.size("dp")

    def forward(self, x):
        mean = self.average(x)
        variance = self.average((x - mean) ** 2)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
            self.variance.lerp_(variance, 0.1)
        return (x - mean) / (variance + 1e-5).sqrt() * self.weight + self.bias


def batch_norm(layout):
    parts = [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), SynchronisedNorm(layout), nn.ReLU()]
    train(layout, ddp, lambda: nn.Sequential(*parts, nn.Linear(WIDTH, VOCABULARY)), clip=torch_clip)


class VocabularyLoss(torch.autograd.Function):
    """Cross-entropy of logits whose vocabulary is cut, as Megatron computes it."""

    @staticmethod
    def forward(ctx, logits, labels, group):
        first = group.rank() * logits.shape[-1]
        most = logits.max(-1).values
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        exp = (logits - most[:, None]).exp()
        total = exp.sum(-1)
        dist.all_reduce(total, group=group)
        own = (labels >= first) & (labels < first + logits.shape[-1])
        at = torch.where(own, labels - first, 0)
        wanted = (logits - most[:, None]).gather(1, at[:, None])[:, 0] * own
        dist.all_reduce(wanted, group=group)
        counted = labels != -100
        ctx.save_for_backward(exp / total[:, None], at, own, counted)
        return ((total.log() - wanted) * counted).sum()

    @staticmethod
    def backward(ctx, gradient):
        softmax, at, own, counted = ctx.saved_tensors
        of_logits = softmax.clone()
        of_logits[torch.arange(len(at)), at] -= own.to(softmax.dtype)
        return of_logits * counted[:, None] * gradient, None, None


class MegatronHead(nn.Module):
    """A vocabulary that is cut over tp; its weight says so by the attributes of Megatron, if it is `marked`."""

    def __init__(self, layout, marked):
        super().__init__()
        size = layout.size("tp")
        self.layout = layout
        self.weight = nn.Parameter(torch.randn(VOCABULARY // size, WIDTH))
        if marked and size > 1:
            self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0

    def forward(self, x, labels):
        if self.layout.size("tp") == 1:
            return loss_sum(x @ self.weight.t(), labels)
        group = self.layout.group("tp")
        return VocabularyLoss.apply((Copy.apply(x, group) @ self.weight.t()).flatten(0, 1), labels.flatten(), group)


class MegatronLayer(nn.Module):
    """A layer that is made in its cut shape, with a fused projection of gates and values."""

    def __init__(self, layout, marked):
        super().__init__()
        size = layout.size("tp")
        self.layout = layout
        self.up = nn.Parameter(torch.randn(4 * WIDTH // size, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH // size) / 4)
        for param, dim in ((self.up, 0), (self.down, 1)):
            if marked and size > 1:
                param.tensor_model_parallel, param.partition_dim = True, dim

    def forward(self, x):
        is_cut = self.layout.size("tp") > 1
        hidden = Copy.apply(x, self.layout.group("tp")) if is_cut else x
        # Gates and values alternate, so that an equal cut has both.
        gate, value = (hidden @ self.up.t()).unflatten(-1, (-1, 2)).unbind(-1)
        out = (F.silu(gate) * value) @ self.down.t()
        return x + (Reduce.apply(out, self.layout.group("tp")) if is_cut else out)


def megatron(layout, marked=True):
    """Layers that are made cut, with a loss over a cut vocabulary."""
    parts = {"embedding": nn.Embedding(VOCABULARY, WIDTH)}
    parts |= {"layer": MegatronLayer(layout, marked), "head": MegatronHead(layout, marked)}
    model = nn.ModuleDict(parts)
    if not marked:
        layout.dims |= {"layer.up": "tp .", "layer.down": ". tp", "head.*": "tp ."}
    layout.load(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for ids, labels in layout.batches(batch_of, STEPS):
        loss = model.head(model.layer(model.embedding(ids)), labels)
        loss = loss / reduced((labels != -100).sum().double(), layout, "dp")
        loss.backward()
        for param in model.parameters():
            reduced(param.grad, layout, "dp")
        layout.step(model, optimizer, loss.detach())


def loss_cut_by_torch(layout):
    """DTensor's loss over a cut vocabulary."""
    model = layout.load(Transformer(1))
    tensor_parallel(model, layout)
    if layout.size("tp") > 1:
        model = Transformer(1)
        layout.load(model)
        ends = {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        parallelize_module(model, layout.mesh["tp"], ends)
    optimizer = torch.optim.AdamW(model.parameters())
    for ids, labels in layout.batches(batch_of, STEPS):
        with loss_parallel():
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
            loss.backward()
        layout.step(model, optimizer, loss.detach())


class Dispatch(nn.Module):
    """Experts over ep, which cuts the samples, too: each token goes to the rank of its expert and comes back."""

    def __init__(self, layout, experts=4):
        super().__init__()
        self.layout, self.count = layout, experts
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 4)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 4)

    def cut(self):
        size, place = self.layout.size("ep"), self.layout.place("ep")
        for name in ("w1", "w2"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach().chunk(size)[place].clone()))

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, 1)
        probabilities = self.router(x).softmax(-1)
        chosen = probabilities.argmax(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.count)
        sent, size = x[order], self.layout.size("ep")
        if size > 1:
            group = self.layout.group("ep")
            others = torch.empty_like(counts)
            dist.all_to_all_single(others, counts, group=group)
            given, got = counts.view(size, -1).sum(1).tolist(), others.view(size, -1).sum(1).tolist()
            own = sent.new_empty(sum(got), WIDTH)
            own = differentiable.all_to_all_single(own, sent, got, given, group=group)
            of_expert = torch.arange(len(self.w1)).repeat(size).repeat_interleave(others)
        else:
            own, of_expert = sent, chosen[order]
        out = (F.silu(own[:, None] @ self.w1[of_expert]) @ self.w2[of_expert])[:, 0]
        if size > 1:
            out = differentiable.all_to_all_single(torch.empty_like(sent), out, given, got, group=group)
        back = torch.zeros_like(x).index_copy(0, order, out)
        return (x + back * probabilities.gather(1, chosen[:, None])).view(shape)


def experts(layout):
    parts = {"embedding": nn.Embedding(VOCABULARY, WIDTH), "moe": Dispatch(layout)}
    model = nn.ModuleDict({**parts, "head": nn.Linear(WIDTH, VOCABULARY)})
    layout.load(model)
    model.moe.cut()
    optimizer = torch.optim.AdamW(model.parameters())
    axes = ("dp", "ep")
    for ids, labels in layout.batches(batch_of, STEPS):
        loss = loss_sum(model.head(model.moe(model.embedding(ids))), labels)
        loss = loss / reduced((labels != -100).sum().double(), layout, *axes)
        loss.backward()
        for name, param in model.named_parameters():
            reduced(param.grad, layout, "dp")
            if "w1" not in name and "w2" not in name:
                reduced(param.grad, layout, "ep")
        layout.step(model, optimizer, loss.detach())


def resharded(layout):
    """Saved and loaded by torch.distributed.checkpoint."""
    model = layout.load(Transformer(1))
    tensor_parallel(model, layout)
    fsdp2(model, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert layout.mesh is not None

    def state():
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def save(folder):
        checkpoints.save({**state(), "scheduler": scheduler.state_dict()}, checkpoint_id=folder)

    def load(folder):
        states = {**state(), "scheduler": scheduler.state_dict()}
        checkpoints.load(states, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        scheduler.load_state_dict(states["scheduler"])

    layout.checkpoint(save, load)
    for ids, labels in layout.batches(batch_of, 3):
        counted = reduced((labels != -100).sum().double(), layout, "dp")
        loss = loss_sum(model(ids), labels) * layout.size("dp") / counted
        loss.backward()
        layout.step(model, optimizer, loss.detach(), clip=0.5, scheduler=scheduler)


def with_evaluation(layout):
    """A trainer that evaluates between steps, and has a moving average of the weights."""
    model = layout.load(Transformer(1, dropout=0.3))
    parallel = ddp(model, layout) or model
    average = torch.optim.swa_utils.AveragedModel(model)
    layout.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    for ids, labels in layout.batches(batch_of, STEPS):
        counted = reduced((labels != -100).sum().double(), layout, "dp")
        model.train()
        (loss_sum(parallel(ids), labels) * layout.size("dp") / counted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        average.update_parameters(model)
        model.eval()
        with torch.no_grad():
            model(ids)


ONE = functools.partial(Transformer, 1)
DROPPING = functools.partial(Transformer, 2, dropout=0.3, checkpointed=True)
# Tied, too.
ALL = functools.partial(DROPPING, tied=True)
SGD = functools.partial(torch.optim.SGD, lr=0.1)

# A training by its name, and its layouts.
SOUND = {
    "ddp": (functools.partial(train, parallelize=ddp), "dp=2", "dp=4"),
    "ddp, SGD, torch's clipping": (functools.partial(train, parallelize=ddp, optimizer=SGD, clip=torch_clip), "dp=2"),
    "hsdp": (functools.partial(train, parallelize=hsdp), "dp_replicate=2 dp_shard=2", "dp_shard=2"),
    "fsdp2": (functools.partial(train, parallelize=fsdp2, clip=torch_clip), "dp=2"),
    "fsdp2, kept, with all": (
        functools.partial(train, parallelize=functools.partial(fsdp2, reshard_after_forward=False), model=ALL),
        "dp=2",
    ),
    "ddp, with all": (functools.partial(train, parallelize=ddp, model=ALL), "dp=2"),
    "tp, checkpointed, dropout": (functools.partial(train, parallelize=tensor_parallel, model=DROPPING), "tp=2"),
    "tp": (functools.partial(train, parallelize=tensor_parallel), "tp=2", "tp=4"),
    "sp": (functools.partial(train, parallelize=sequence_parallel, clip=torch_clip), "tp=2"),
    "tp and fsdp2": (functools.partial(train, parallelize=tensor_parallel_and_fsdp2), "dp=2 tp=2"),
    "compiled layers": (functools.partial(train, parallelize=compiled, model=ONE), "dp=2"),
    "compiled model": (functools.partial(train, parallelize=compiled_whole, model=ONE), "dp=2"),
    "zero": (zero, "dp=2"),
    "accumulating": (ddp_accumulating, "dp=2"),
    "gpipe": (functools.partial(pipeline, schedule=ScheduleGPipe), "pp=2"),
    "1f1b": (pipeline, "pp=2", "pp=4"),
    "interleaved": (functools.partial(pipeline, schedule=ScheduleInterleaved1F1B, stages=2), "pp=2"),
    "1f1b, tied": (functools.partial(pipeline, tied=True), "pp=2"),
    "ring": (ring, "cp=2", "cp=3", "dp=2 cp=2"),
    "batch norm": (batch_norm, "dp=2", "dp=4"),
    "megatron": (megatron, "tp=2", "dp=2 tp=2"),
    "megatron by dims": (functools.partial(megatron, marked=False), "tp=2"),
    "loss cut by torch": (loss_cut_by_torch, "tp=2"),
    "experts by all-to-all": (experts, "ep=2", "ep=4", "dp=2 ep=2"),
    "resharded": (resharded, "dp=2 -> tp=2", "tp=2 -> dp=2", "dp=2 tp=2 -> single"),
    "with evaluation": (with_evaluation, "dp=2"),
    "fsdp1": (functools.partial(train, parallelize=fsdp1, clip=None), "dp=2"),
}
