"""Fragments of random training programs: gradients, optimizers, batches, results, and changes between calls."""
# ruff: noqa: E501 (a fragment is easier to compare with others on one line)

from __future__ import annotations

from spmd_fragments import Fragment, odd, plain

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
        "loss = loss * sum(p.grad is not None for p in model.parameters())",
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
        "model.load_state_dict({k: v * 0.5 + 0.1 if v.is_floating_point() else v for k, v in model.state_dict().items()})",
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
    *odd("for p in params:\n    p.grad = None", "for p in params:\n    if p.grad is not None:\n        p.grad.zero_()",
         "x = x * (1 + sum(p.grad is not None for p in model.parameters()))\noptimizer.zero_grad()",
         "if model.head.weight.grad is not None:\n    x = x + model.head.weight.grad.norm()\nmodel.zero_grad()"),
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
