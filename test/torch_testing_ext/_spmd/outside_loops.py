"""Training loops that use models outside of their step, and loops with teachers, run under DDP and by the engine."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from loops import CALLS, Normed, adam, error, nesterov, net, sgd, state, update, whole
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

LOOPS: dict[str, Callable[[Any], Any]] = {}
TEACHERS: dict[str, Callable[[Any], Any]] = {}


def outside(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    LOOPS[function.__name__] = function
    return function


def with_teacher(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    TEACHERS[function.__name__] = function
    return function


def inner(model: Any) -> Any:
    """The module inside DDP's wrapper."""
    return getattr(model, "module", model)


def training(between: Callable[..., Any], build: Callable[[], nn.Module] = net, make: Any = adam) -> None:
    """Register a loop that calls `between(model, optimizer, batch, call)` after each call of its step."""

    def run(parallel: Any) -> Any:
        model = parallel.model(build())
        optimizer = make(model)
        step, results = parallel.step(update), []
        for call in range(CALLS):
            results.append(step(model, optimizer, parallel.batch(call)))
            results.append(between(model, optimizer, parallel.batch(50 + call), call))
        return results, state(model)

    LOOPS[between.__name__] = run


# -- calls of the model


def validating(model, optimizer, batch, call):
    with torch.no_grad():
        return error(model, batch)


def validating_in_eval(model, optimizer, batch, call):
    model.eval()
    with torch.no_grad():
        loss = error(model, batch)
    model.train()
    return loss


def validating_in_inference_mode(model, optimizer, batch, call):
    with torch.inference_mode():
        return float(error(model, batch))


def validating_with_a_graph(model, optimizer, batch, call):
    return error(model, batch).item()


def validating_a_part(model, optimizer, batch, call):
    with torch.no_grad():
        return inner(model)[2](inner(model)[1](inner(model)[0](batch[0])))


def validating_under_autocast(model, optimizer, batch, call):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return error(model, batch)


def validating_with_an_error(model, optimizer, batch, call):
    """A validation that fails in the middle leaves the model usable."""

    def fail(*_):
        raise KeyError("mine")

    handle = inner(model)[2].register_forward_pre_hook(fail)
    try:
        with torch.no_grad():
            model(batch[0])
    except KeyError:
        pass
    handle.remove()
    with torch.no_grad():
        return error(model, batch)


def gradient_of_the_input(model, optimizer, batch, call):
    x = batch[0].clone().requires_grad_()
    return torch.autograd.grad(inner(model)(x).sum(), x)[0]


def by_functional_calls(model, optimizer, batch, call):
    weights = {name: p * 0.5 for name, p in inner(model).named_parameters()}
    with torch.no_grad():
        called = torch.func.functional_call(inner(model), weights, (batch[0],))
    return called.detach(), F.linear(batch[0], inner(model)[0].weight, inner(model)[0].bias).detach()


for each in (
    validating,
    validating_in_eval,
    validating_in_inference_mode,
    validating_with_a_graph,
    validating_a_part,
    validating_under_autocast,
    validating_with_an_error,
    gradient_of_the_input,
    by_functional_calls,
):
    training(each)


class Convolutional(nn.Module):
    """A convolution, batch norm, group norm, and uneven rows."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.group = nn.Conv1d(1, 5, 3), nn.BatchNorm1d(5), nn.GroupNorm(1, 5)
        self.scale, self.bare = nn.Parameter(torch.ones(())), nn.Parameter(torch.full((5,), 0.3))
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        hidden = self.group(self.norm(self.conv(x[:, None]))).mean(-1)
        return self.out(hidden * self.bare) * self.scale


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.rnn(x.view(len(x), 3, 2))[0][:, -1])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.layer(self.embed(x.abs().long().clamp(max=6))).mean(1))


class TiedTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x.abs().long().clamp(max=6)).mean(1))[:, :3]


def validating_model(build: Callable[[], nn.Module]) -> None:
    def between(model, optimizer, batch, call):
        model.eval()
        with torch.no_grad():
            loss = error(inner(model), batch)
        model.train()
        with torch.no_grad():  # DDP's own forward would share buffers first
            return loss, error(inner(model), batch), whole(next(inner(model).buffers(), torch.zeros(1)))

    between.__name__ = f"validating_{build.__name__}"
    training(between, build)


for kind in (Convolutional, Recurrent, Attending, TiedTable):
    validating_model(kind)


# -- averages of weights


def averaging(name: str, fold: Callable[[Any, Any], None], prepare: Callable[[Any], Any], late: bool) -> None:
    """Register a loop with an average of the model, which is folded outside of the step."""

    def run(parallel: Any) -> Any:
        model = parallel.model(net())
        optimizer = adam(model)
        step, ema, results = parallel.step(update), None, []
        for call in range(CALLS):
            if call == late:
                if call == 0 and model is inner(model):  # all ranks start with the weights of rank 0
                    for p in model.parameters():
                        torch.distributed.broadcast(p.data, 0)
                ema = prepare(inner(model))
            results.append(step(model, optimizer, parallel.batch(call)))
            if ema is not None:
                fold(ema, inner(model))
                with torch.no_grad():
                    if isinstance(ema, nn.Module):
                        results.append(error(ema, parallel.batch(50 + call)))
        values = ema.state_dict() if isinstance(ema, nn.Module) else ema
        values = values if isinstance(values, list) else list(values.values())
        return results, [whole(value) for value in values if isinstance(value, torch.Tensor)], state(model)

    LOOPS[f"{name}_{'late' if late else 'early'}"] = run


@torch.no_grad()
def by_lerp(ema, model):
    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
        mine.lerp_(theirs, 0.3)


@torch.no_grad()
def by_mul_add(ema, model):
    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
        mine.mul_(0.7).add_(theirs.data, alpha=0.3)


@torch.no_grad()
def by_data_copy(ema, model):
    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
        mine.data.copy_(0.7 * mine.data + 0.3 * theirs.data)


@torch.no_grad()
def by_foreach(ema, model):
    mine, theirs = [*ema.parameters()], [p.detach() for p in model.parameters()]
    torch._foreach_mul_(mine, 0.7)
    torch._foreach_add_(mine, theirs, alpha=0.3)


@torch.no_grad()
def by_foreach_lerp(ema, model):
    torch._foreach_lerp_([*ema.parameters()], [*model.parameters()], 0.3)


@torch.no_grad()
def by_state_dict(ema, model):
    theirs = model.state_dict()
    for name, value in ema.state_dict().items():
        value.copy_(value * 0.7 + theirs[name] * 0.3)


@torch.no_grad()
def by_load_state_dict(ema, model):
    ema.load_state_dict(model.state_dict())


def by_averaged_model(ema, model):
    ema.update_parameters(model)


@torch.no_grad()
def by_list(ema, model):
    for mine, theirs in zip(ema, model.parameters(), strict=True):
        mine.lerp_(theirs, 0.3)


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))


def averaged_in_a_loop(model):
    return AveragedModel(model, avg_fn=lambda mine, theirs, count: 0.7 * mine + 0.3 * theirs)


def averaged_equally(model):
    return AveragedModel(model, use_buffers=True)


def clones(model):
    return [p.detach().clone() for p in model.parameters()]


def frozen_copy(model):
    return copy.deepcopy(model).requires_grad_(False).eval()


for late in (False, True):
    for fold in (by_lerp, by_mul_add, by_data_copy, by_foreach, by_foreach_lerp, by_state_dict, by_load_state_dict):
        averaging(fold.__name__, fold, copy.deepcopy, late)
    for prepare in (averaged, averaged_in_a_loop, averaged_equally):
        averaging(prepare.__name__, by_averaged_model, prepare, late)
    averaging("by_list", by_list, clones, late)
    averaging("by_lerp_frozen", by_lerp, frozen_copy, late)


# -- reads and writes of parameters, checkpoints


def reading(model, optimizer, batch, call):
    first = next(model.parameters())
    norms = [float(p.norm()) for p in model.parameters()]
    total = sum(p.numel() for p in model.parameters())
    joined = whole(torch.nn.utils.parameters_to_vector(model.parameters()))
    return norms, total, joined, whole(first.detach().cpu()), whole((first * torch.ones(first.shape)).sum())


def writing(model, optimizer, batch, call):
    with torch.no_grad():
        first, *_, last = model.parameters()
        first.mul_(0.9)
        first.add_(torch.full(first.shape, 0.01))
        last.copy_(torch.arange(3.0) / 10)
        last.data += torch.ones(3) * 0.1


def writing_data(model, optimizer, batch, call):
    first, *_, last = model.parameters()
    last.data = torch.arange(3.0) / 10
    first.data = first.data * 0.9


def initializing(model, optimizer, batch, call):
    if call == 1:
        nn.init.constant_(inner(model)[2].weight, 0.1)
        nn.init.zeros_(inner(model)[2].bias)


def pruning(model, optimizer, batch, call):
    mask = (torch.arange(42).view(7, 6) % 3 > 0).float()
    with torch.no_grad():
        inner(model)[0].weight.mul_(mask)
        inner(model)[0].weight.masked_fill_(mask == 0, 0.001)


def clipping_outside(model, optimizer, batch, call):
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return float(norm), [whole(p.grad) for p in model.parameters()]


def clipping_values_outside(model, optimizer, batch, call):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return [whole(p.grad) for p in model.parameters()]


def loading_whole_weights(model, optimizer, batch, call):
    if call == 1:
        generator = torch.Generator().manual_seed(3)
        weights = {k: torch.randn(v.shape, generator=generator) / 5 for k, v in inner(model).state_dict().items()}
        inner(model).load_state_dict(weights)


def restoring_the_best(model, optimizer, batch, call):
    if call == 1:
        model.__dict__["best"] = copy.deepcopy(inner(model).state_dict()), copy.deepcopy(optimizer.state_dict())
    if call == 2:
        weights, states = model.__dict__.pop("best")
        inner(model).load_state_dict(weights)
        optimizer.load_state_dict(states)


def cloned_weights(model, optimizer, batch, call):
    if call == 1:
        model.__dict__["best"] = {name: value.clone() for name, value in inner(model).state_dict().items()}
    if call == 2:
        inner(model).load_state_dict(model.__dict__.pop("best"))


def saving(model, optimizer, batch, call):
    file = io.BytesIO()
    torch.save({"model": inner(model).state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    inner(model).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return [whole(value) for value in saved["model"].values()]


def saving_the_model(model, optimizer, batch, call):
    file = io.BytesIO()
    torch.save(inner(model), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return [whole(p) for p in loaded.parameters()]


def pickling(model, optimizer, batch, call):
    return [whole(p) for p in pickle.loads(pickle.dumps(inner(model))).parameters()]


def freezing(model, optimizer, batch, call):
    inner(model)[0].requires_grad_(call % 2 == 1)


def regularizing(model, optimizer, batch, call):
    with torch.no_grad():
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        return float(penalty + error(model, batch))


for each in (
    reading,
    writing,
    writing_data,
    initializing,
    pruning,
    clipping_outside,
    clipping_values_outside,
    loading_whole_weights,
    restoring_the_best,
    cloned_weights,
    saving,
    saving_the_model,
    pickling,
    freezing,
    regularizing,
):
    training(each)
validating_model(Normed)


def setting_items(model, optimizer, batch, call):
    first, last = inner(model)[0], inner(model)[2]
    with torch.no_grad():
        first.weight[0, 0] = 0.3
        first.weight[1] = torch.arange(6.0) / 10
        first.weight.data[2:4, 1] = 0.2
        last.bias[-1] += 0.5


@torch.no_grad()
def writing_through_views(model, optimizer, batch, call):
    first, last = inner(model)[0], inner(model)[2]
    first.weight[0].zero_()
    first.weight.view(-1)[3:5] += 1
    first.weight.t().mul_(0.9)
    last.weight.data.t()[1].fill_(0.1)
    for row in last.weight:
        row.mul_(0.99)
    row = first.weight[3]
    row.add_(1)
    part = row[:2]
    part.zero_()
    first.weight.mul_(0.5)
    return row.clone(), part.sum(), first.weight.max(), first.weight.argmax()


def reading_values(model, optimizer, batch, call):
    w = inner(model)[0].weight.detach()
    tensors = w.topk(2)[0], w.sort()[0], w.mean(0), w.cumsum(0), torch.cat([w, w]), w @ w.t(), w.sum(1), w.norm(dim=1)
    numbers = w.std(), w.median(), w.max(), w.var(unbiased=False), w.amin(), w.norm(1), torch.linalg.svdvals(w)
    return w.tolist(), w.numpy().sum().item(), tensors, numbers, [row.sum() for row in w], len(w), bool((w == w).all())


def as_a_vector(model, optimizer, batch, call):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def initializing_at_random(model, optimizer, batch, call):
    torch.manual_seed(100 + call)
    if call == 1:
        nn.init.orthogonal_(inner(model)[0].weight)
        nn.init.trunc_normal_(inner(model)[2].weight)
    if call == 2:
        inner(model)[0].reset_parameters()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.01)


def evaluating_an_average(model, optimizer, batch, call):
    """The usual swap: the model gets the values of the average, and its own again."""
    named = dict(inner(model).named_parameters())
    average = model.__dict__.setdefault("average", {name: whole(p) for name, p in named.items()})
    before = {name: p.data for name, p in named.items()}
    for name, p in named.items():
        average[name].lerp_(p.detach(), 0.5)
        p.data = average[name]
    with torch.no_grad():
        loss = error(inner(model), batch)
    for name, p in named.items():
        p.data = before[name]
    if call == CALLS - 1:
        del model.__dict__["average"]
    return loss


def changing_gradients(model, optimizer, batch, call):
    before = [p.grad.max().item() for p in model.parameters()]
    for p in model.parameters():
        p.grad = p.grad + torch.ones(p.shape)
        p.grad[0] = 0
        p.grad.mul_(0.5)
    return before, [whole(p.grad) for p in model.parameters()]


def another_optimizer(model, optimizer, batch, call):
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()


def mapping_over_a_batch(model, optimizer, batch, call):
    with torch.no_grad():
        return torch.vmap(inner(model))(batch[0])


def loading_into_a_plain_model(model, optimizer, batch, call):
    plain = net()
    plain.load_state_dict(inner(model).state_dict())
    return plain(batch[0]).detach()


def copying_in_half(model, optimizer, batch, call):
    half = copy.deepcopy(inner(model)).bfloat16()
    with torch.no_grad():
        return half(batch[0].bfloat16()).float()


for each in (
    setting_items,
    writing_through_views,
    reading_values,
    as_a_vector,
    initializing_at_random,
    evaluating_an_average,
    changing_gradients,
    another_optimizer,
    mapping_over_a_batch,
    loading_into_a_plain_model,
    copying_in_half,
):
    training(each)


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "rprop": lambda model: torch.optim.Rprop(model.parameters()),
}


def optimizer_outside(name: str) -> None:
    """Register a loop whose step only makes gradients: the loop itself clips them and steps the optimizer."""

    def run(parallel: Any) -> Any:
        model = parallel.model(net())
        optimizer, results = OPTIMIZERS[name](model), []
        # It names the optimizer, which so gets the DTensors.
        step = parallel.step(lambda batch, _=optimizer: error(model, batch).backward())
        for call in range(CALLS):
            step(parallel.batch(call))
            results.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        return results, state(model)

    LOOPS[f"{name}_outside"] = run


for each_name in OPTIMIZERS:
    optimizer_outside(each_name)


@outside
def training_outside(parallel):
    """A second loss is learnt by the plain model, without the step, by gradients that DDP averages."""
    model = parallel.model(net())
    optimizer = sgd(model)
    step, results = parallel.step(update), []
    for call in range(CALLS):
        results.append(step(model, optimizer, parallel.batch(call)))
        results.append(update(model, optimizer, parallel.batch(60 + call)))
    return results, state(model)


@outside
def converting(parallel):
    """The model becomes double between calls. DDP does not see that: it wraps the model again."""
    module = net()
    wrapped = parallel.model(module)
    optimizer, results = sgd(module), []
    step = parallel.step(update)
    for call in range(CALLS):
        if call == 2:
            module.double()
            optimizer.zero_grad()
            wrapped = parallel.model(module)
        dtype = torch.float64 if call >= 2 else torch.float32
        results.append(step(wrapped, optimizer, [part.to(dtype) for part in parallel.batch(call)]))
    return results, state(module)


@outside
def converting_to_and_back(parallel):
    module = net()
    wrapped = parallel.model(module)
    optimizer, results = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), []
    step = parallel.step(update)
    for call in range(CALLS):
        results.append(step(wrapped, optimizer, parallel.batch(call)))
        module.to(torch.bfloat16)
        module.to(torch.float32)
        wrapped = parallel.model(module)
        with torch.no_grad():
            results.append(error(module, parallel.batch(call)))
    return results, state(module)


@outside
def two_models(parallel):
    one, other = parallel.model(net()), parallel.model(net(3, 4, 1))
    optimizers = adam(one), sgd(other)

    def function(batch):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = other(one(batch[0])).pow(2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    step, results = parallel.step(function), []
    for call in range(CALLS):
        results.append(step(parallel.batch(call)))
        with torch.no_grad():
            results.append(other(one(parallel.batch(call)[0])))
            results.append(other(parallel.batch(call)[1]))
    return results, state(one, other)


# -- teachers


class Both(nn.Module):
    """A student and its teacher in one module."""

    def __init__(self, freeze=True):
        super().__init__()
        self.student = net()
        self.teacher = copy.deepcopy(self.student)
        if freeze:
            self.teacher.requires_grad_(False)


class Wrapped(nn.Module):
    """For DDP: forwards the student through the wrapper."""

    def __init__(self, parallel, freeze=True):
        super().__init__()
        both = Both(freeze)
        self.student = parallel.model(both.student)
        self.teacher = both.teacher
        if inner(self.student) is not self.student:
            self.teacher.load_state_dict(inner(self.student).state_dict())


def distil(both, optimizer, batch, fold):
    optimizer.zero_grad()
    with torch.no_grad():
        target = both.teacher(batch[0])
    loss = (both.student(batch[0]) - target).pow(2).mean() + error(both.student, batch)
    loss.backward()
    optimizer.step()
    fold(both.teacher, inner(both.student))
    return loss.detach()


def no_fold(teacher, student):
    pass


def byol(name: str, fold: Callable[[Any, Any], None], captured: bool, freeze: bool, make: Any = adam) -> None:
    def run(parallel):
        both = Wrapped(parallel, freeze)
        optimizer = make(both.student)
        if captured:
            student, teacher = both.student, both.teacher
            closed = type("Pair", (), {"student": student, "teacher": teacher})

            def function(batch):
                optimizer.zero_grad()
                with torch.no_grad():
                    target = teacher(batch[0])
                loss = (student(batch[0]) - target).pow(2).mean() + error(student, batch)
                loss.backward()
                optimizer.step()
                fold(teacher, inner(student))
                return loss.detach()

            step = parallel.step(function)
            assert closed
            results = [step(parallel.batch(call)) for call in range(CALLS)]
        else:
            step = parallel.step(distil)
            results = [step(both, optimizer, parallel.batch(call), fold) for call in range(CALLS)]
        return results, state(both.student, both.teacher)

    TEACHERS[f"{name}_{'captured' if captured else 'inside'}_{'frozen' if freeze else 'free'}"] = run


for captured in (False, True):
    for freeze in (False, True):
        for fold in (by_lerp, by_mul_add, by_data_copy, by_foreach, by_foreach_lerp, by_state_dict, no_fold):
            byol(fold.__name__, fold, captured, freeze)
byol("fused", by_lerp, False, True, lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True))
byol("foreach", by_mul_add, True, True, nesterov)


@with_teacher
def made_between_calls(parallel):
    """The teacher is a copy of the student that is made between calls, and a part of the step from then on."""
    student = parallel.model(net())
    optimizer, teachers = adam(student), []

    @parallel.step
    def step(batch):
        optimizer.zero_grad()
        loss = error(student, batch)
        for teacher in teachers:
            with torch.no_grad():
                target = teacher(batch[0])
            loss = loss + (student(batch[0]) - target).pow(2).mean()
        loss.backward()
        optimizer.step()
        for teacher in teachers:
            by_lerp(teacher, inner(student))
        return loss.detach()

    results = []
    for call in range(CALLS):
        if call == 2:
            teachers.append(copy.deepcopy(inner(student)).requires_grad_(False))
        results.append(step(parallel.batch(call)))
    return results, state(student, *teachers)


@with_teacher
def pretrained_teacher(parallel):
    """A teacher of its own weights, the same on all ranks, and another optimizer in its closure."""
    student = parallel.model(net())
    generator = torch.Generator().manual_seed(5)
    teacher = net(6, 9, 3)
    with torch.no_grad():
        for p in teacher.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    teacher.eval()
    optimizer = adam(student)

    @parallel.step
    def step(batch):
        optimizer.zero_grad()
        soft = teacher(batch[0]).detach().softmax(-1)
        loss = F.kl_div(student(batch[0]).log_softmax(-1), soft, reduction="batchmean")
        loss.backward()
        optimizer.step()
        return loss.detach()

    results = []
    for call in range(CALLS):
        results.append(step(parallel.batch(call)))
        with torch.no_grad():
            results.append(teacher(parallel.batch(call)[0]))
    return results, state(student, teacher)


@with_teacher
def momentum_encoder(parallel):
    """MoCo: the key encoder follows the query encoder before the loss, and a queue is a buffer."""
    query = parallel.model(net())
    key = copy.deepcopy(inner(query)).requires_grad_(False)
    if inner(query) is query:
        for p, k in zip(query.parameters(), key.parameters(), strict=True):
            torch.distributed.broadcast(p.data, 0)
            k.copy_(p.data)
    optimizer = sgd(query)
    queue = torch.zeros(8, 3)

    @parallel.step
    def step(batch):
        with torch.no_grad():
            for q, k in zip(inner(query).parameters(), key.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1
            keys = F.normalize(key(batch[0]), dim=1)
        logits = F.normalize(query(batch[0]), dim=1) @ torch.cat([keys, queue]).t()
        loss = F.cross_entropy(logits, torch.arange(len(keys)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue.copy_(torch.cat([keys, queue])[:8])
        return loss.detach()

    return [step(parallel.batch(call)) for call in range(CALLS)], state(query, key), queue


@with_teacher
def teacher_with_statistics(parallel):
    """A frozen teacher gets the student's weights, and the statistics that the student has on each rank."""
    student = parallel.model(Normed())
    torch.manual_seed(5)
    teacher = Normed().requires_grad_(False).eval()
    optimizer = sgd(student)

    @parallel.step
    def step(batch):
        optimizer.zero_grad()
        loss = F.mse_loss(student(batch[0]), teacher(batch[0]))
        loss.backward()
        optimizer.step()
        return loss.detach()

    results = []
    for call in range(CALLS):
        results.append(step(parallel.batch(call)))
        teacher.load_state_dict(inner(student).state_dict())
    return results, state(student, teacher)
