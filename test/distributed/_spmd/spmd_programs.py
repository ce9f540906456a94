"""The grammar of random training programs: fragments of Python, each with what it needs and whether it is mainstream.

A fragment of the mainstream must not be refused. The others may be refused, but never be silently wrong.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from spmd_truth import TrainingProgram


@dataclass(frozen=True)
class Fragment:
    """A piece of a program. `setup` is code that it needs in `build()`, before the step is defined."""

    code: str
    plain: bool = True
    setup: str = ""
    init: str = ""  # code in the model's __init__, with {i} as the number of the layer


def plain(*codes: str) -> list[Fragment]:
    return [Fragment(code) for code in codes]


def odd(*codes: str) -> list[Fragment]:
    return [Fragment(code, plain=False) for code in codes]


# Layers map (n, width) to (n, width). The code runs in forward.
LAYERS = [
    Fragment("x = self.l{i}(x)", init="self.l{i} = nn.Linear(D, D)"),
    Fragment("x = torch.tanh(self.l{i}(x))", init="self.l{i} = nn.Linear(D, D, bias=False)"),
    Fragment("x = x + self.l{i}(x)", init="self.l{i} = nn.Sequential(nn.Linear(D, 3), nn.GELU(), nn.Linear(3, D))"),
    Fragment("x = self.l{i}(x)", init="self.l{i} = nn.LayerNorm(D)"),
    Fragment("x = self.l{i}(x)", init="self.l{i} = nn.BatchNorm1d(D)"),
    Fragment("x = self.l{i}(x)", init="self.l{i} = nn.Dropout(0.3)"),
    Fragment("x = self.l{i}(x)", init="self.l{i} = nn.PReLU()"),
    Fragment("x = x * self.l{i}", init="self.l{i} = nn.Parameter(torch.randn(()))"),
    Fragment("x = x * self.l{i} + 1", init="self.l{i} = nn.Parameter(torch.randn(D))"),
    Fragment("x = self.l{i}(x.unsqueeze(1)).squeeze(1)", init="self.l{i} = nn.Conv1d(1, 1, 3, padding=1)"),
    Fragment("x = self.l{i}(x.unsqueeze(1))[0][:, -1]", init="self.l{i} = nn.GRU(D, D, batch_first=True)"),
    Fragment("x = self.l{i}(x.unsqueeze(1))[0][:, -1]", init="self.l{i} = nn.LSTM(D, D, batch_first=True)"),
    Fragment(
        "x = self.l{i}(x.unsqueeze(1)).squeeze(1)",
        init="self.l{i} = nn.TransformerEncoderLayer(D, 1, 8, dropout=0.0, batch_first=True)",
    ),
    Fragment(
        "x = self.l{i}b(torch.sin(self.l{i}(x)))",
        init="self.l{i} = nn.Linear(D, D)\nself.l{i}b = nn.Linear(D, D)\nself.l{i}b.weight = self.l{i}.weight",
    ),
    Fragment("x = self.l{i}(x)", init="self.l{i} = nn.Linear(D, D).requires_grad_(False)"),
    Fragment("pass", init="self.l{i} = nn.Linear(D, D)"),
    Fragment("x = self.l{i}(x)", init="self.l{i} = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))"),
    Fragment(
        "x = self.l{i}(x)", init="self.l{i} = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))", plain=False
    ),
    Fragment("x = self.l{i}(x)", init="self.l{i} = nn.utils.parametrizations.orthogonal(nn.Linear(D, D))", plain=False),
    Fragment("x = x + self.l{i}(x.argmax(-1))", init="self.l{i} = nn.Embedding(D, D)"),
    Fragment("x = x + self.l{i}(x.argmax(-1))", init="self.l{i} = nn.Embedding(D, D, max_norm=0.5)", plain=False),
    Fragment("x = x + self.l{i}(x.argmax(-1))", init="self.l{i} = nn.Embedding(D, D, sparse=True)", plain=False),
    Fragment("x = x + self.l{i}(x.argmax(-1).view(-1, 1))", init="self.l{i} = nn.EmbeddingBag(D, D)", plain=False),
    Fragment("x = self.l{i}(x, x)", init="self.l{i} = nn.Bilinear(D, D, D)"),
    Fragment(
        "x = checkpoint(self.l{i}, x, use_reentrant=False)",
        init="self.l{i} = nn.Sequential(nn.Linear(D, D), nn.Tanh())",
    ),
    Fragment(
        "x = checkpoint(self.l{i}, x, use_reentrant=True) if x.requires_grad else self.l{i}(x)",
        plain=False,
        init="self.l{i} = nn.Sequential(nn.Linear(D, D), nn.Tanh())",
    ),
    Fragment("x = F.linear(x, self.l{i}.weight.t(), self.l{i}.bias)", init="self.l{i} = nn.Linear(D, D)"),
    Fragment("x = F.linear(x, F.normalize(self.l{i}.weight), self.l{i}.bias)", init="self.l{i} = nn.Linear(D, D)"),
    Fragment(
        "for layer in self.l{i}:\n    x = torch.relu(layer(x)) if type(layer) is nn.Linear else x",
        plain=False,
        init="self.l{i} = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])",
    ),
    Fragment(
        "for layer in self.l{i}:\n    x = torch.relu(layer(x))", init="self.l{i} = nn.ModuleList([nn.Linear(D, D)] * 2)"
    ),
    Fragment(
        "x = sum(p.sum() for p in self.l{i}) * x",
        init="self.l{i} = nn.ParameterList([torch.randn(D), torch.randn(2, 3)])",
    ),
    Fragment("self.l{i}.add_(1)\nx = x * 1.01", init="self.register_buffer('l{i}', torch.zeros((), dtype=torch.long))"),
    Fragment(
        "x = x + self.l{i}\nself.l{i} = 0.9 * self.l{i} + 0.1 * x.detach().mean(0)",
        plain=False,
        init="self.register_buffer('l{i}', torch.zeros(D))",
    ),
    Fragment(
        "x = x + self.l{i}\nwith torch.no_grad():\n    self.l{i}.mul_(0.9).add_(0.1 * x.mean(0))",
        plain=False,
        init="self.register_buffer('l{i}', torch.zeros(D))",
    ),
    Fragment("x = x + (0 if self.l{i} is None else self.l{i})", init="self.register_buffer('l{i}', None)", plain=False),
    Fragment("x = x * self.l{i}", init="self.l{i} = 1.5"),
    Fragment("x = x * self.l{i}['a'][0]", init="self.l{i} = dict(a=[1.5])"),
    Fragment("x = x * self.l{i}.a", init="self.l{i} = types.SimpleNamespace(a=1.5)"),
    Fragment("x = x * (self.l{i} if self.training else 1)", init="self.l{i} = 0.5"),
    Fragment("self.l{i}.append(len(x))\nx = x * 1.1", init="self.l{i} = []", plain=False),
    Fragment("self.l{i} += 1\nx = x / self.l{i}", init="self.l{i} = 1", plain=False),
    Fragment("self.cache = x.detach()", plain=False),
    Fragment(
        "with torch.no_grad():\n    self.l{i}.weight.clamp_(-0.3, 0.3)\nx = self.l{i}(x)",
        plain=False,
        init="self.l{i} = nn.Linear(D, D)",
    ),
    Fragment("self.l{i}.weight.data.mul_(0.9)\nx = self.l{i}(x)", plain=False, init="self.l{i} = nn.Linear(D, D)"),
    Fragment("x = self.l{i}(x) / math.sqrt(self.l{i}.weight.shape[0])", init="self.l{i} = nn.Linear(D, D)"),
    Fragment(
        "x = self.l{i}(x) / sum(p.numel() for p in self.l{i}.parameters())",
        plain=False,
        init="self.l{i} = nn.Linear(D, D)",
    ),
    Fragment(
        "x = torch.func.functional_call(self.l{i}, {'weight': self.l{i}.weight * 2}, (x,))",
        plain=False,
        init="self.l{i} = nn.Linear(D, D)",
    ),
]

# Statements in forward or step on x, of shape (n, width): Python on sizes, views, randomness.
SIZES = [
    *plain(
        "x = x * x.shape[0] / 3",
        "x = x + torch.arange(x.shape[0]).unsqueeze(1)",
        "x = x.view(x.size(0), -1) + torch.zeros(x.size(0), 1)",
        "x = x + torch.ones(len(x), D)",
        "x = x.flatten().view(-1, D)",
        "x = x - x.mean(0)",
        "x = x / (1 + x.norm())",
        "x = x[torch.randperm(x.shape[0])]",
        "x = x + 0.1 * torch.randn_like(x)",
        "x = x * torch.rand(x.shape[0], 1)",
        "x = F.dropout(x, 0.2, self.training)",
        "x = x.t().contiguous().t()",
        "x = torch.cat([x[: len(x) // 2], x[len(x) // 2 :]])",
        "x = x.new_ones(x.shape) + x",
        "x = x * (1.0 / len(x))",
        "x = x.unsqueeze(0).squeeze(0)",
        "x = torch.where(x > 0, x, 0.1 * x)",
        "x = x.sort(0)[0]",
    ),
    *odd(
        "for k in range(len(x)):\n    x = x + x[k]",
        "for row in x:\n    x = x + row",
        "x = torch.stack([row * k for k, row in enumerate(x)])",
        "x = x * math.log(len(x) + 1)",
        "x = x * float(len(x))",
        "x = x * int(math.sqrt(x.shape[0]))",
        "x = x if len(x) == 4 else 2 * x",
        "x = x if len(x) > 4 else 2 * x",
        "x = x if len(x) % 2 else -x",
        "x = torch.cat([part * (k + 1) for k, part in enumerate(x.split(2))])",
        "x = torch.cat([part * (k + 1) for k, part in enumerate(x.chunk(2))])",
        "x = torch.cat([part.mean(0, keepdim=True).expand_as(part) for part in torch.tensor_split(x, 3) if len(part)])",
        "x = x * {2: 0.5, 3: 0.7, 4: 0.9}.get(len(x), 1.5)",
        "x = x * TABLE[min(len(x), 3)]",
        "x = x * len(f'{len(x)}')",
        "x = x * len('a' * len(x))",
        "x = x * max(len(x), 3)",
        "x = x * sum([0.1] * len(x))",
        "x = x * numpy.log(x.shape[0] + 1)",
        "x = x + torch.linspace(0, 1, len(x)).unsqueeze(1)",
        "x = x + F.one_hot(torch.arange(len(x)) % D, D)",
        "x = x + F.one_hot(x.argmax(-1), max(len(x), D))[:, :D]",
        "x = x * (len(x) // 2 + 1) ** 0.5",
        "x = x * round(len(x) / 3)",
        "x = x * (x.numel() / 7)",
        "x = x * str(tuple(x.shape)).count('4')+ x",
        "x = x * pow(len(x), 2)",
        "x = x * torch.tensor(len(x))",
        "x = x * torch.tensor([1.0] * len(x)).unsqueeze(1)",
        "x = x * torch.full((len(x), 1), 1.0 / len(x))",
        "x = x * (2 if bool(len(x) - 2) else 3)",
        "x = x * len(list(range(0, len(x), 2)))",
        "x = x * len(range(len(x)))",
        "x = x * (1 if x.shape == (4, D) else 3)",
        "x = x * (1 if x.shape[0] in (2, 3) else 3)",
        "x = x * hash(x.shape[0])",
        "x = x * (1 + divmod(len(x), 2)[1])",
        "x = x * math.factorial(x.size(0))",
        "x = x * (0.5 ** len(x))",
        "x = x * math.ceil(len(x) / 2)",
        "x = x * numpy.ones(len(x)).sum()",
        "x = x[x[:, 0].argsort()]",
        "x = x * random.random()",
        "x = x * numpy.random.rand()",
        "x = x if random.random() > 0.5 else 2 * x",
        "x = x * SETTINGS['scale']",
        "x = x * SETTINGS_LIST[0]",
        "x = x * captured_tensor",
        "x = x * captured_number",
        "x = x * torch.rand(1, generator=captured_generator)",
        "x = x.repeat_interleave(2, 0)[::2]",
        "x = x * (x > 0).sum().item()",
        "x = x if x.sum() > 0 else -x",
        "x = x * x.detach().max().item()",
        "x = torch.from_numpy(x.detach().numpy() * 2) + x",
        "x = x * os.environ.get('SPMD_TEST', 2)",
        "x = x * next(captured_iterator)",
        "x = x * dist.get_rank() + x",
        "x = x / dist.get_world_size()",
    ),
]

LOSSES = [
    *plain(
        "loss = (out - y).pow(2).mean()",
        "loss = F.mse_loss(out, y)",
        "loss = (out - y).sum()",
        "loss = (out - y).pow(2).sum() / len(x)",
        "loss = F.cross_entropy(out, y.argmax(-1))",
        "loss = F.cross_entropy(out, y.softmax(-1), label_smoothing=0.1)",
        "loss = F.binary_cross_entropy_with_logits(out, y.sigmoid())",
        "loss = F.smooth_l1_loss(out, y)",
        "loss = F.kl_div(out.log_softmax(-1), y.softmax(-1), reduction='batchmean')",
        "loss = (out - y).pow(2).mean() + 0.1 * sum(p.pow(2).sum() for p in model.parameters())",
        "loss = (out - y).abs().mean() + 0.1 * torch.stack([p.abs().sum() for p in model.parameters()]).sum() * x.mean()",
        "loss = out[y > 0].pow(2).sum()",
        "loss = torch.logsumexp(out, 0).mean() + out.var()",
        "loss = F.nll_loss(out.log_softmax(-1), y.argmax(-1), reduction='sum')",
    ),
    *odd(
        "loss = sum((o - t).pow(2).sum() for o, t in zip(out, y)) / len(x)",
        "loss = (out - y).pow(2).mean() + 0.1 * max(p.abs().max() for p in model.parameters())",
        "loss = (out - y).pow(2).mean()\nif loss > 1:\n    loss = loss * 0.5",
        "loss = (out - y).pow(2).mean()\nlosses.append(loss.item())",
        "loss = (out - y).pow(2).mean() * (0.1 if len(losses) else 1.0)\nlosses.append(1)",
        "loss = (out - y).pow(2).mean()\ndist.all_reduce(loss)",
        "loss = (out - y).pow(2).mean()\nshared = loss.detach().clone()\ndist.all_reduce(shared)\nloss = loss / (1 + shared.abs())",
        "loss = (out - y).pow(2).mean()\nshared = [torch.zeros(()) for _ in range(dist.get_world_size())]\n"
        "dist.all_gather(shared, loss.detach())\nloss = loss / (1 + torch.stack(shared).sum())",
        "loss = (out - y).pow(2).mean()\nshared = funcol.all_reduce(loss.detach(), 'sum', dist.group.WORLD)\nloss = loss / (1 + shared)",
        "loss = (out - y).pow(2).mean()\nscale = torch.ones(()) * (dist.get_rank() + 1)\ndist.broadcast(scale, 0)\nloss = loss * scale",
        "loss = (out - y).pow(2).mean()\nobjects = [None] * dist.get_world_size()\ndist.all_gather_object(objects, len(x))\nloss = loss / sum(objects)",
        "loss = (out - y).pow(2).mean()\ngrads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, create_graph=True)\n"
        "loss = loss + sum(g.pow(2).sum() for g in grads if g is not None)",
        "xx = x.detach().requires_grad_()\nout = model(xx)\n(g,) = torch.autograd.grad(out.sum(), xx, create_graph=True)\n"
        "loss = out.pow(2).mean() + (g.norm() - 1) ** 2",
        "loss = (out - y).pow(2).mean() + 0.1 * sum(p.norm() / p.shape[0] for p in model.parameters() if p.dim() > 1)",
        "loss = (out - y).pow(2).mean() + 0.1 * sum(p.pow(2).sum() for p in params)",
        "loss = (out - y).pow(2).mean() + 0.1 * nn.utils.parameters_to_vector(model.parameters()).norm()",
        "loss = (out - y).pow(2).mean() + 0.1 * sum(p.pow(2).sum() for n, p in model.named_parameters() if 'weight' in n)",
    ),
]

BACKWARD = [
    *plain(*["loss.backward()"] * 5, "loss.backward(torch.ones_like(loss))", "(loss * 0.5).backward()"),
    *odd(
        "loss.backward(retain_graph=True)\nloss.backward()",
        "for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)):\n    p.grad = g",
        "trained = [p for p in model.parameters() if p.requires_grad]\n"
        "for p, g in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True)):\n    p.grad = g",
        "torch.autograd.backward([loss, out.sum()])",
        "torch.autograd.backward(loss, inputs=[p for p in model.parameters() if p.requires_grad])",
        "loss.backward()\nif not loss.isfinite():\n    return None",
        "loss.backward()\nloss2 = model(x).pow(2).mean()\nloss2.backward()",
    ),
]

# Between backward and the optimizer's step, or after it.
GRADIENTS = [
    *plain(
        "pass",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        "torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)",
        "norm = sum(p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None)",
    ),
    *odd(
        "torch.nn.utils.clip_grad_norm_(params, 0.1)",
        "torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g['params']], 0.1)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float('inf'))",
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)",
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad = p.grad * 0.5",
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.data.add_(p.data, alpha=0.1)",
        "for p in params:\n    if p.grad is not None:\n        p.grad.mul_(0.5)",
        "for p in params:\n    if p.grad is not None:\n        p.grad = p.grad.sign()",
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.div_(p.numel())",
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.div_(p.grad.norm() + 1)",
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(p.norm() / (p.grad.norm() + 1))",
        "for p in model.parameters():\n    if p.grad is not None and p.dim() > 1:\n        p.grad.sub_(p.grad.mean(0))",
        "for p in model.parameters():\n    if p.grad is not None and p.dim() > 1:\n        p.grad.sub_(p.grad.mean(1, keepdim=True))",
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.add_(torch.randn_like(p))",
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.add_(torch.randn(p.shape) * 0.1)",
        "for p in model.parameters():\n    if p.grad is not None:\n        dist.all_reduce(p.grad)",
        "for p in model.parameters():\n    if p.grad is not None:\n        torch.nan_to_num_(p.grad, nan=0.0)",
        "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.clamp_(-1 / p.shape[-1] if p.dim() else -1)",
        "for p in model.parameters():\n    p.grad = torch.ones_like(p)",
        "for p in model.parameters():\n    p.grad = x.detach().mean() * torch.ones_like(p)",
        "for p in model.parameters():\n    p.grad = None",
        "if list(model.parameters())[0].grad is None:\n    return None",
        "with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.99)",
        "with torch.no_grad():\n    for p in params:\n        p.mul_(0.99)",
        "for p in model.parameters():\n    p.data.mul_(0.99)",
        "for p in model.parameters():\n    p.data = p.data * 0.99",
        "for p in model.parameters():\n    p.data -= 0.01 * p.data",
        "with torch.no_grad():\n    for p in model.parameters():\n        p.add_(x.mean())",
        "with torch.no_grad():\n    for p in model.parameters():\n        p.copy_(p.clamp(-0.5, 0.5))",
        "with torch.no_grad():\n    for p in model.parameters():\n        if p.dim():\n            p[0] = 0",
        "with torch.no_grad():\n    model.head.weight.clamp_(-0.2, 0.2)",
        "with torch.no_grad():\n    model.head.weight[0] = 0",
        "with torch.no_grad():\n    model.head.weight.copy_(F.normalize(model.head.weight))",
        "model.head.weight.data = model.head.weight.data * 0.9",
        "model.head.weight.grad.mul_(0.5)",
        "nn.init.constant_(model.head.bias, 0.1)",
        "nn.init.xavier_uniform_(model.head.weight)",
        "with torch.no_grad():\n    before = model.head.weight.clone()\n    model.head.bias.sub_(before.sum())",
        "with torch.no_grad():\n    model.apply(lambda m: m.weight.mul_(0.9) if isinstance(m, nn.Linear) and m.weight.dim() == 2 else None)",
        "model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})",
        "state = {k: v.clone() for k, v in model.state_dict().items()}",
        "vector = nn.utils.parameters_to_vector(model.parameters())\nnn.utils.vector_to_parameters(vector * 0.9, model.parameters())",
        "with torch.no_grad():\n    model.head.weight += 0.01",
        "with torch.no_grad():\n    model.head.weight.add_(model.head.weight.grad, alpha=-0.1)",
        "torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)",
        "with torch.no_grad():\n    torch._foreach_mul_(list(model.parameters()), 0.9)",
        "optimizer.param_groups[0]['lr'] = optimizer.param_groups[0]['lr'] * 0.5",
        "model.head.requires_grad_(not model.head.weight.requires_grad)",
        "if len(x) > 3:\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        "assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())",
        "count = sum(p.numel() for p in model.parameters())\nwith torch.no_grad():\n    for p in model.parameters():\n        p.div_(1 + 1 / count)",
    ),
]

OPTIMIZERS = [
    *plain(
        "torch.optim.SGD(model.parameters(), lr=0.1)",
        "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)",
        "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)",
        "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)",
        "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, maximize=True, dampening=0.1)",
        "torch.optim.Adam(model.parameters(), lr=0.01)",
        "torch.optim.Adam(model.parameters(), lr=0.01, fused=True)",
        "torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)",
        "torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)",
        "torch.optim.AdamW(model.parameters(), lr=0.01)",
        "torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, amsgrad=True)",
        "torch.optim.Adagrad(model.parameters(), lr=0.1)",
        "torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True)",
        "torch.optim.Adadelta(model.parameters(), lr=0.1)",
        "torch.optim.Adamax(model.parameters(), lr=0.01)",
        "torch.optim.NAdam(model.parameters(), lr=0.01)",
        "torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)",
        "torch.optim.Rprop(model.parameters(), lr=0.01)",
        "torch.optim.SGD([{'params': [p for p in model.parameters() if p.dim() > 1], 'weight_decay': 0.1}, "
        "{'params': [p for p in model.parameters() if p.dim() <= 1], 'lr': 0.02}], lr=0.1, momentum=0.5)",
        "torch.optim.AdamW([{'params': [p], 'lr': 0.01 * (k + 1)} for k, p in enumerate(model.parameters())], lr=0.1, fused=True)",
        "torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)",
        "torch.optim.SGD(model.head.parameters(), lr=0.1)",
    ),
    *odd(
        "torch.optim.RAdam(model.parameters(), lr=0.01)",
        "torch.optim.ASGD(model.parameters(), lr=0.01)",
        "torch.optim.Adafactor(model.parameters(), lr=0.01)",
        "HandSGD(model.parameters(), lr=0.1)",
        "Counting(model.parameters(), lr=0.1)",
        "Lookahead(model.parameters(), lr=0.1)",
        "Trusting(model.parameters(), lr=0.1)",
    ),
]

# What happens before a call.
CHANGES = [
    *plain(
        "pass",
        "optimizer.param_groups[0]['lr'] *= 0.5",
        "model.eval()",
        "model.train()",
        "optimizer.param_groups[-1]['weight_decay'] = 0.2",
        "model.load_state_dict({k: torch.ones_like(v) * 0.3 if v.is_floating_point() else v for k, v in model.state_dict().items()})",
        "optimizer.load_state_dict(optimizer.state_dict())",
        "optimizer.zero_grad()",
        "optimizer.zero_grad(set_to_none=False)",
    ),
    *odd(
        "model.head.requires_grad_(False)",
        "model.head.requires_grad_(True)",
        "model.head.weight.requires_grad_(False)",
        "model.gain = 3.0",
        "model.gains[0] = 3.0",
        "model.options['gain'] = 3.0",
        "model.nothing = torch.ones(())",
        "for m in model.modules():\n    if isinstance(m, nn.Dropout):\n        m.p = 0.9",
        "for m in model.modules():\n    if isinstance(m, nn.BatchNorm1d):\n        m.momentum = 0.5",
        "for m in model.modules():\n    if isinstance(m, nn.LayerNorm):\n        m.eps = 0.5",
        "for m in model.modules():\n    if isinstance(m, nn.BatchNorm1d):\n        m.eval()",
        "model.act = nn.ReLU()",
        "model.act.scale = 3.0",
        "model.act = torch.sin",
        "model.extra.append(nn.Tanh())",
        "model.extra[0] = nn.ReLU()",
        "model.forward = lambda x, old=model.forward: 2 * old(x)",
        "model.head.register_forward_hook(lambda m, args, out: out * 0.5)",
        "model.head.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))",
        "model.head.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 0.5 for g in gi))",
        "model.head.weight.register_hook(lambda g: g * 0.5)",
        "model.head.bias.register_post_accumulate_grad_hook(lambda p: [p.grad.mul_(0.5)].clear())",
        "SETTINGS['scale'] = 4.0",
        "SETTINGS_LIST[0] = 4.0",
        "TABLE[3] = 4.0",
        "losses.clear()",
        "captured_tensor = captured_tensor * 2",
        "captured_tensor.mul_(2)",
        "captured_number = 5.0",
        "global_scale(7.0)",
        "os.environ['SPMD_TEST'] = '3'",
        "model.head = nn.Linear(D, D)\noptimizer.add_param_group({'params': list(model.head.parameters())})",
        "model.head.weight = nn.Parameter(torch.ones(D, D))",
        "model.head.bias = None",
        "optimizer.param_groups[0]['momentum'] = 0.3",
        "optimizer.param_groups[0]['betas'] = (0.5, 0.9)",
        "optimizer.param_groups[0]['lr'] = torch.tensor(0.05)",
        "optimizer.state.clear()",
        "torch.manual_seed(3)",
        "for p in model.parameters():\n    p.grad = None",
        "model.head.weight.grad = None",
        "with torch.no_grad():\n    model.head.weight.mul_(0.5)",
        "model.head.weight.data.mul_(0.5)",
        "helper.scale = 3.0",
        "helper.nested['a'][0] = 9.0",
        "model.gain_tensor = torch.tensor(4.0)",
        "model.gain_tensor.fill_(0.7)",
        "model.head.__class__ = Doubled",
    ),
]

HEADS = [
    *plain(*["x = self.head(x)"] * 4),
    *odd(
        "x = self.head(x) * self.gain",
        "x = self.head(x) * self.gains[0]",
        "x = self.head(x) * self.options.get('gain', 1.0)",
        "x = self.head(x) if self.nothing is None else self.head(x) * self.nothing",
        "x = self.act(self.head(x))",
        "for extra in self.extra:\n    x = extra(x)\nx = self.head(x)",
        "x = self.head(x) * GLOBAL_SCALE",
        "x = self.head(x) * helper.scale * helper.nested['a'][0]",
        "x = self.head(x) * self.gain_tensor",
        "x = x @ self.head.weight.T + (0 if self.head.bias is None else self.head.bias)",
        "x = self.head(x) * sum(1 for p in self.parameters() if p.requires_grad)",
        "x = self.head(x) * (2 if self.head.weight.grad is None else 1)",
    ),
]

# How a batch is packed, and how the step unpacks it.
_TUPLE = "x, y = batch"
BATCHES = [
    *[Fragment("return x, y", setup=_TUPLE)] * 4,
    Fragment("return [x, y]", setup=_TUPLE),
    Fragment("return {'x': x, 'y': y}", setup="x, y = batch['x'], batch['y']"),
    Fragment("return collections.OrderedDict(x=x, y=y)", setup="x, y = batch['x'], batch['y']"),
    Fragment("return ((x,), {'y': y, 'n': len(x)})", setup="(x,), (y, n) = batch[0], batch[1].values()", plain=False),
    Fragment("return NamedPair(x, y)", setup=_TUPLE, plain=False),
    Fragment("return NamedPair(x, y)", setup="x, y = batch.x, batch.y", plain=False),
    Fragment("return Pair(x, y)", setup="x, y = batch.x, batch.y", plain=False),
    Fragment("return Frozen(x, y)", setup="x, y = batch.x, batch.y", plain=False),
    Fragment("return collections.UserDict(x=x, y=y)", setup="x, y = batch['x'], batch['y']", plain=False),
    Fragment("return types.SimpleNamespace(x=x, y=y)", setup="x, y = batch.x, batch.y", plain=False),
    Fragment("box.x, box.y = x, y\nreturn box", setup="x, y = batch.x, batch.y", plain=False),
    Fragment("box_list[:] = [x, y]\nreturn box_list", setup=_TUPLE),
    Fragment("box_list[:] = [x, y]\nreturn 0", setup="x, y = box_list", plain=False),
    Fragment("box.x, box.y = x, y\nreturn None", setup="x, y = box.x, box.y", plain=False),
    Fragment("return x.numpy(), y.numpy()", setup="x, y = map(torch.from_numpy, batch)", plain=False),
    Fragment("return x, y, len(x) % 3", setup="x, y, k = batch\nx = x * k", plain=False),
    Fragment(
        "return x, y, {'kind': 'a' if len(x) > 3 else 'b'}",
        setup="x, y, k = batch\nx = x * (2 if k['kind'] == 'a' else 3)",
    ),
    Fragment("return x, y, 0.1 * len(x)", setup="x, y, k = batch\nx = x * k"),
    Fragment("return collections.deque([x, y])", setup=_TUPLE, plain=False),
    Fragment("return lambda: (x, y)", setup="x, y = batch()", plain=False),
    Fragment("return iter([x, y])", setup=_TUPLE, plain=False),
    Fragment(
        "return [(a, b) for a, b in zip(x, y)]", setup="x, y = (torch.stack(part) for part in zip(*batch))", plain=False
    ),
    Fragment("return x, y, {3, len(x)}", setup="x, y, k = batch\nx = x * len(k)", plain=False),
    Fragment("return x, y, numpy.float64(len(x))", setup="x, y, k = batch\nx = x * float(k)", plain=False),
    Fragment("return x, y, range(len(x))", setup="x, y, k = batch\nx = x * len(k)", plain=False),
    Fragment("return x, x", setup="x, y = batch\ny = y * 2", plain=False),
    Fragment("return x, y, x[0]", setup="x, y, k = batch\nx = x + k"),
    Fragment("return x, y, (x > 0)", setup="x, y, k = batch\nx = torch.where(k, x, -x)"),
    Fragment("return x, y", setup="x, y = batch\nx.mul_(2)"),
    Fragment("return x.t().contiguous().t(), y[::1]", setup=_TUPLE),
    Fragment("return torch.cat([x, x], 1)[:, :D], y", setup=_TUPLE),
]

RESULTS = [
    *plain(
        "return loss",
        "return loss.detach()",
        "return {'loss': loss, 'out': out}",
        "return None",
        "return loss, out.detach().mean()",
    ),
    *odd(
        "return loss.item()",
        "return float(loss)",
        "return f'{loss.item():.3f}'",
        "return loss.detach().numpy()",
        "return len(x)",
        "return out.shape",
        "return [p.grad for p in model.parameters()]",
        "return [p.shape for p in model.parameters()]",
        "return sum(p.numel() for p in model.parameters())",
        "return [p.norm() for p in model.parameters()]",
        "return model.head.weight.grad",
        "return model.head.weight.clone()",
        "return [type(p) for p in model.modules()]",
        "return NamedPair(loss, out)",
        "return Pair(loss, out)",
        "return loss.tolist()",
        "return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])",
        "return out.argmax(-1)[out[:, 0] > 0]",
        "return optimizer.param_groups[0]['lr']",
        "return [p.grad is None for p in model.parameters()]",
    ),
]

ZEROING = [
    *plain(*["optimizer.zero_grad()"] * 4, "model.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "pass",
           "for p in model.parameters():\n    p.grad = None"),
    *odd("for p in params:\n    p.grad = None", "for p in params:\n    if p.grad is not None:\n        p.grad.zero_()"),
]  # fmt: skip

UPDATES = [
    *plain(*["optimizer.step()"] * 6),
    *odd(
        "with torch.no_grad():\n    for p in model.parameters():\n        if p.grad is not None:\n            p.sub_(0.1 * p.grad)",
        "with torch.no_grad():\n    for p in params:\n        if p.grad is not None:\n            p.sub_(0.1 * p.grad)",
        "with torch.no_grad():\n    for p in model.parameters():\n        if p.grad is not None:\n            p -= 0.1 / math.sqrt(p.numel()) * p.grad",
        "for p in model.parameters():\n    if p.grad is not None:\n        p.data.add_(p.grad, alpha=-0.1)",
        "for p in model.parameters():\n    if p.grad is not None:\n        p.data = p.data - 0.1 * p.grad",
        "hidden.step()",
        "hidden.step()\nhidden.zero_grad()",
        "optimizer.step()\nscheduler.step()",
        "optimizer.step()\nfor e, p in zip(averages, model.parameters()):\n    e.lerp_(p.detach(), 0.1)",
        "if losses:\n    optimizer.step()\nlosses.append(1)",
        "optimizer.step()\noptimizer.zero_grad()",
        "optimizer.step()\noptimizer.zero_grad(set_to_none=False)",
        "if len(x) > 3:\n    optimizer.step()",
        "if loss.isfinite():\n    optimizer.step()",
        "optimizer.step(lambda: loss)",
    ),
]

PREAMBLE = """\
import collections, dataclasses, math, os, random, types
import numpy, torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

D = {width}
TABLE, SETTINGS, SETTINGS_LIST, GLOBAL_SCALE = {{2: 0.5, 3: 0.7}}, {{'scale': 2.0}}, [2.0], 2.0
NamedPair = collections.namedtuple("NamedPair", "x y")
Pair = dataclasses.make_dataclass("Pair", ["x", "y"])
Frozen = dataclasses.make_dataclass("Frozen", ["x", "y"], frozen=True)


def global_scale(value):
    global GLOBAL_SCALE
    GLOBAL_SCALE = value


class Scaled(nn.Module):
    scale = 2.0

    def forward(self, x):
        return x * self.scale


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)

"""

OPTIMIZER_CLASSES = {
    "HandSGD": """
class HandSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
""",
    "Counting": """
class Counting(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    p.data.add_(p.grad.data, alpha=-group["lr"] / state["count"])
""",
    "Lookahead": """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    slow = self.state[p].setdefault("slow", p.clone())
                    p.sub_(group["lr"] * p.grad)
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)
""",
    "Trusting": """
class Trusting(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / (p.grad.norm() + 1e-3)
                    p.sub_(group["lr"] * ratio.clamp(max=2) * p.grad / math.sqrt(p.numel()))
""",
}

TEMPLATE = """
def build():
    os.environ.pop("SPMD_TEST", None)
    losses, box, box_list, captured_iterator = [], types.SimpleNamespace(), [], iter(range(1, 100))
    captured_tensor, captured_number, captured_generator = torch.tensor(2.0), 2.0, torch.Generator().manual_seed(0)
    helper = types.SimpleNamespace(scale=2.0, nested={{'a': [1.0]}})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.gains, self.options, self.nothing = 1.0, [1.0], {{}}, None
            self.gain_tensor, self.act, self.extra = torch.ones(()), Scaled(), nn.ModuleList([nn.Sigmoid()])
{init}
            self.head = nn.Linear(D, D)

        def forward(self, x):
{forward}
            return x

    model = Net()
    optimizer = {optimizer}
    hidden = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    params, averages = list(model.parameters()), [p.detach().clone() for p in model.parameters()]

    def step(model, optimizer, batch):
{step}

    def batch(x, y):
{batch}

    def change(call):
        nonlocal captured_tensor, captured_number
{change}

    return dict(modules=dict(model=model), optimizers=dict(optimizer=optimizer), step=step, batch=batch, change=change)
"""


def _indented(lines: list[str], depth: int) -> str:
    return textwrap.indent("\n".join(lines), "    " * depth)


SECTIONS: dict[str, list[Fragment]] = {
    "layers": LAYERS, "sizes": SIZES, "head": HEADS, "loss": LOSSES, "backward": BACKWARD, "gradients": GRADIENTS,
    "optimizer": OPTIMIZERS, "changes": CHANGES, "batch": BATCHES, "result": RESULTS, "zeroing": ZEROING,
    "update": UPDATES, "after": GRADIENTS,
}  # fmt: skip
# Sections that have the most to get wrong are drawn odd more often.
_ODD = [*SECTIONS, "sizes", "sizes", "layers", "gradients", "changes", "changes"]


@st.composite
def training_programs(draw: Any, max_odd: int = 3) -> TrainingProgram:
    """Random programs, most of whose fragments are of the mainstream."""
    width, style = draw(st.sampled_from([4, 3, 5])), draw(st.sampled_from(["replicate", "fully_shard"]))
    odd_sections = draw(st.lists(st.sampled_from(_ODD), max_size=max_odd, unique=True))
    used: list[Fragment] = []

    def pick(section: str, may_be_odd: bool = True) -> Fragment:
        is_odd = may_be_odd and section in odd_sections
        choices = [f for f in SECTIONS[section] if f.plain is not is_odd]
        used.append(draw(st.sampled_from(choices or SECTIONS[section])))
        return used[-1]

    layers = [pick("layers", number == 0) for number in range(draw(st.integers(1, 3)))]
    numbered = [
        (f.init.replace("{i}", str(number)), f.code.replace("{i}", str(number))) for number, f in enumerate(layers)
    ]
    forward = [code for _, code in numbered]
    sizes_in_step = draw(st.booleans())
    size = [pick("sizes").code.replace("self.training", "model.training" if sizes_in_step else "self.training")]
    if not sizes_in_step:
        forward.insert(draw(st.integers(0, len(forward))), size[0])
    batch = pick("batch")
    head = pick("head")
    step = [
        batch.setup,
        pick("zeroing").code,
        *(size if sizes_in_step else []),
        "out = model(x)",
        pick("loss").code,
        pick("backward").code,
        pick("gradients").code,
        pick("update").code,
        pick("after").code if "after" in odd_sections else "pass",
        pick("result").code,
    ]
    optimizer = pick("optimizer").code
    calls = draw(st.integers(3, 4))
    changes = {call: pick("changes").code for call in range(1, calls)}
    if "changes" not in odd_sections:
        changes = {call: code for call, code in changes.items() if draw(st.booleans())}
    change_lines = [f"if call == {call}:\n{_indented([code], 1)}" for call, code in changes.items()] or ["pass"]
    classes = "".join(text for name, text in OPTIMIZER_CLASSES.items() if name in optimizer)
    source = (
        PREAMBLE.format(width=width)
        + classes
        + TEMPLATE.format(
            init=_indented([init for init, _ in numbered], 3),
            forward=_indented([*forward, head.code], 3),
            optimizer=optimizer,
            step=_indented(step, 2),
            batch=_indented([batch.code], 2),
            change=_indented(change_lines, 2),
        )
    )
    one_size = st.sampled_from([4, 3, 2, 5, 6, 1, 8])
    sizes = tuple(draw(st.one_of(one_size.map(lambda n: (n,)), st.tuples(*[one_size] * 4))) for _ in range(calls))
    strange = tuple(" # ".join(filter(None, (f.init, f.code, f.setup))) for f in used if not f.plain)
    options = draw(
        st.sampled_from(
            [(), (), (), (("bucket_mb", 0.0001),), (("reshard_after_forward", True), ("bucket_mb", 0.0001))]
        )
    )
    return TrainingProgram(source, sizes, width, style, options, strange, not strange and draw(st.booleans()))
