"""The fragments that random training programs are made of, except for their optimizers and what happens around a step.

A fragment of the mainstream must not be refused. The others may be refused, but never be silently wrong.
"""
# ruff: noqa: E501 (a fragment is easier to compare with others on one line)

from __future__ import annotations

from dataclasses import dataclass


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
