"""The examples of test_spmd_properties.py, by value; choose_examples.py chose them."""

# ruff: noqa: E501 (a fragment is easier to compare with others on one line)

from spmd_programs import Recipe

ON_TWO_RANKS = [
    (
        "self.register_buffer('l{i}', torch.zeros((), dtype=torch.long)): self.l{i}.add_(1)\nx = x *",
        {
            "recipe": Recipe(
                (
                    (
                        "self.register_buffer('l{i}', torch.zeros((), dtype=torch.long))",
                        "self.l{i}.add_(1)\nx = x * 1.01",
                    ),
                    ("self.l{i} = nn.Dropout(0.3)", "x = self.l{i}(x)"),
                    ("self.l{i} = nn.PReLU()", "x = self.l{i}(x)"),
                ),
                "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)",
                ((2,), (1,), (6,), (2,)),
                loss="loss = out[y > 0].pow(2).sum()",
                backward="loss.backward(torch.ones_like(loss))",
                gradients="torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)",
                result="return {'loss': loss.detach(), 'out': out.detach()}",
                changes=(
                    (1, "model.act = nn.PReLU()"),
                    (2, "model.head.register_forward_hook(lambda m, args, out: out * 0.5)"),
                    (3, "optimizer.state.clear()"),
                ),
                width=3,
                style="fully_shard",
                odd=(
                    "self.register_buffer('l{i}', torch.zeros((), dtype=torch.long)) # self.l{i}.add_(1)\nx = x * 1.01",
                    "model.act = nn.PReLU()",
                    "model.head.register_forward_hook(lambda m, args, out: out * 0.5)",
                    "optimizer.state.clear()",
                ),
            )
        },
    ),
    (
        "5 odd fragments, gradients: torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type=float('i",
        {
            "recipe": Recipe(
                (
                    (
                        "self.l{i} = nn.Linear(D, D)",
                        "x = F.linear(x, F.normalize(self.l{i}.weight.t()), self.l{i}.bias)",
                    ),
                    (
                        "self.l{i} = nn.Sequential(nn.Linear(D, D), nn.Tanh())",
                        "x = checkpoint(self.l{i}, x, use_reentrant=False)",
                    ),
                ),
                "torch.optim.AdamW([{'params': [p], 'lr': 0.01 * (k + 1)} for k, p in enumerate(model.parameters())], lr=0.1)",
                ((6, 3, 2, 4), (3,), (1,), (2,)),
                zeroing="optimizer.zero_grad(set_to_none=False)",
                backward="torch.autograd.backward(loss, inputs=[p for p in model.parameters() if p.requires_grad])",
                gradients="torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type=float('inf'))",
                changes=(
                    (1, "model.gain = 3.0"),
                    (2, "model.head.weight.data.mul_(0.5)"),
                    (3, "model.head.requires_grad_(False)"),
                ),
                bucket_mb=0.0001,
                odd=(
                    "torch.autograd.backward(loss, inputs=[p for p in model.parameters() if p.requires_grad])",
                    "torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type=float('inf'))",
                    "model.gain = 3.0",
                    "model.head.weight.data.mul_(0.5)",
                    "model.head.requires_grad_(False)",
                ),
            )
        },
    ),
    (
        "after: for p in model.parameters():\n    if p.grad is not None:\n        p.grad.add_(torch.r",
        {
            "recipe": Recipe(
                (
                    (
                        "self.l{i} = nn.Linear(D, D)\nself.l{i}b = nn.Linear(D, D)\nself.l{i}b.weight = self.l{i}.weight",
                        "x = self.l{i}b(torch.sin(self.l{i}(x)))",
                    ),
                    ("self.l{i} = nn.LayerNorm(D)", "x = self.l{i}(x)"),
                    (
                        "self.l{i} = nn.ParameterList([torch.randn(D), torch.randn(2, 3)])",
                        "x = sum(p.sum() for p in self.l{i}) * x",
                    ),
                ),
                "torch.optim.NAdam(model.parameters(), lr=0.01)",
                ((2, 2, 6, 3), (4, 3, 6, 4), (3,)),
                loss="loss = (out - y).pow(2).sum() / len(x)",
                update="optimizer.step()\noptimizer.zero_grad()",
                after="for p in model.parameters():\n    if p.grad is not None:\n        p.grad.add_(torch.randn(p.shape) * 0.1)",
                result="return {'loss': loss.detach(), 'out': out.detach()}",
                changes=(
                    (1, "model.head.weight.register_hook(lambda g: g * 0.5)"),
                    (2, "with torch.no_grad():\n    model.head.weight.mul_(0.5)"),
                ),
                width=3,
                style="fully_shard",
                bucket_mb=0.0001,
                odd=(
                    "optimizer.step()\noptimizer.zero_grad()",
                    "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.add_(torch.randn(p.shape) * 0.1)",
                    "model.head.weight.register_hook(lambda g: g * 0.5)",
                    "with torch.no_grad():\n    model.head.weight.mul_(0.5)",
                ),
            )
        },
    ),
    (
        "backward: torch.autograd.backward([loss, out.sum()]), self.l{i} = nn.utils.parametrization",
        {
            "recipe": Recipe(
                (
                    ("self.l{i} = nn.PReLU()", "x = self.l{i}(x)"),
                    ("self.l{i} = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))", "x = self.l{i}(x)"),
                ),
                "torch.optim.Adadelta(model.parameters(), lr=0.1)",
                ((4,), (3, 3, 6, 6), (3,), (4, 6, 2, 2)),
                zeroing="pass",
                loss="loss = F.cross_entropy(out, y.argmax(-1))",
                backward="torch.autograd.backward([loss, out.sum()])",
                changes=(
                    (1, "model.eval()"),
                    (2, "optimizer.load_state_dict(optimizer.state_dict())"),
                    (3, "optimizer.zero_grad(set_to_none=False)"),
                ),
                width=5,
                style="fully_shard",
                odd=("torch.autograd.backward([loss, out.sum()])",),
            )
        },
    ),
    (
        "self.l{i} = nn.Linear(D, D).requires_grad_(False): x = self.l{i}(x), before a call: optimi",
        {
            "recipe": Recipe(
                (
                    ("self.l{i} = nn.Linear(D, D).requires_grad_(False)", "x = self.l{i}(x)"),
                    (
                        "self.l{i} = nn.ModuleList([nn.Linear(D, D)] * 2)",
                        "for layer in self.l{i}:\n    x = torch.relu(layer(x))",
                    ),
                    ("self.l{i} = nn.Linear(D, D)", "x = self.l{i}(x)"),
                ),
                "torch.optim.SGD(model.parameters(), lr=0.1)",
                ((4,), (4,), (3,)),
                backward="loss.backward(torch.ones_like(loss))",
                gradients="torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
                result="return None",
                changes=((1, "model.train()"), (2, "optimizer.param_groups[-1]['weight_decay'] = 0.2")),
                width=3,
            )
        },
    ),
    (
        "result: return [p.norm() for p in params], zeroing: if model.head.weight.grad is not None:",
        {
            "recipe": Recipe(
                (("self.l{i} = nn.BatchNorm1d(D)", "x = self.l{i}(x)"),),
                "torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)",
                ((4,), (4,), (4,)),
                zeroing="if model.head.weight.grad is not None:\n    x = x + model.head.weight.grad.norm()\nmodel.zero_grad()",
                gradients="with torch.no_grad():\n    torch._foreach_mul_(list(model.parameters()), 0.9)",
                result="return [p.norm() for p in params]",
                changes=((1, "optimizer.zero_grad()"), (2, "optimizer.zero_grad()")),
                bucket_mb=0.0001,
                odd=(
                    "if model.head.weight.grad is not None:\n    x = x + model.head.weight.grad.norm()\nmodel.zero_grad()",
                    "with torch.no_grad():\n    torch._foreach_mul_(list(model.parameters()), 0.9)",
                    "return [p.norm() for p in params]",
                ),
            )
        },
    ),
]
OF_THE_MAINSTREAM = [
    (
        "optimizer: torch.optim.Adamax(model.parameters(), lr=0.01), self.l{i} = nn.Linear(D, D).re",
        {
            "recipe": Recipe(
                (
                    ("self.l{i} = nn.Linear(D, D)", "pass"),
                    ("self.l{i} = nn.Parameter(torch.randn(D))", "x = x * self.l{i} + 1"),
                    ("self.l{i} = nn.Linear(D, D).requires_grad_(False)", "x = self.l{i}(x)"),
                ),
                "torch.optim.Adamax(model.parameters(), lr=0.01)",
                ((1,), (3,), (3, 6, 4, 6), (6, 3, 4, 4)),
                loss="loss = F.mse_loss(out, y) + 0.1 * sum(p.pow(2).sum() for p in model.parameters()) * x.mean()",
                gradients="torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)",
                changes=(
                    (1, "model.train()"),
                    (2, "optimizer.param_groups[0]['lr'] *= 0.5"),
                    (3, "optimizer.zero_grad()"),
                ),
                style="fully_shard",
                bucket_mb=0.0001,
            )
        },
    ),
    (
        "self.l{i} = nn.Parameter(torch.randn(())): x = x * self.l{i}, before a call: optimizer.zer",
        {
            "recipe": Recipe(
                (
                    (
                        "self.l{i} = nn.Sequential(nn.Linear(D, D), nn.Tanh())",
                        "x = checkpoint(self.l{i}, x, use_reentrant=False)",
                    ),
                    ("self.l{i} = nn.Parameter(torch.randn(()))", "x = x * self.l{i}"),
                    ("self.l{i} = nn.LayerNorm(D)", "x = self.l{i}(x)"),
                ),
                "torch.optim.NAdam(model.parameters(), lr=0.01)",
                ((2,), (6,), (1,), (4,)),
                zeroing="pass",
                loss="loss = F.mse_loss(out, y) + 0.1 * sum(p.pow(2).sum() for p in model.parameters()) * x.mean()",
                gradients="torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)",
                result="return {'loss': loss.detach(), 'out': out.detach()}",
                changes=((2, "model.eval()"), (3, "optimizer.zero_grad(set_to_none=False)")),
                width=3,
            )
        },
    ),
    (
        "self.l{i} = nn.Linear(D, D, bias=False): x = torch.tanh(self.l{i}(x)), self.l{i} = nn.Para",
        {
            "recipe": Recipe(
                (
                    (
                        "self.l{i} = nn.ParameterList([torch.randn(D), torch.randn(2, 3)])",
                        "x = sum(p.sum() for p in self.l{i}) * x",
                    ),
                    (
                        "self.l{i} = nn.Linear(D, D)",
                        "x = F.linear(x, F.normalize(self.l{i}.weight.t()), self.l{i}.bias)",
                    ),
                    ("self.l{i} = nn.Linear(D, D, bias=False)", "x = torch.tanh(self.l{i}(x))"),
                ),
                "torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)",
                ((3, 3, 6, 3), (2,), (2,)),
                zeroing="optimizer.zero_grad(set_to_none=False)",
                loss="loss = F.mse_loss(out, y) + 0.1 * sum(p.pow(2).sum() for p in model.parameters()) * x.mean()",
                result="return None",
                changes=(
                    (1, "optimizer.load_state_dict(optimizer.state_dict())"),
                    (2, "optimizer.param_groups[-1]['weight_decay'] = 0.2"),
                ),
                width=3,
                style="fully_shard",
                bucket_mb=0.0001,
            )
        },
    ),
    (
        "optimizer: torch.optim.AdamW([{'params': [p], 'lr': 0.01 * (k + 1)} for k, p in enumerate(",
        {
            "recipe": Recipe(
                (
                    ("self.l{i} = nn.Dropout(0.3)", "x = self.l{i}(x)"),
                    ("self.l{i} = nn.BatchNorm1d(D)", "x = self.l{i}(x)"),
                    ("self.l{i} = nn.Linear(D, D)", "x = self.l{i}(x)"),
                ),
                "torch.optim.AdamW([{'params': [p], 'lr': 0.01 * (k + 1)} for k, p in enumerate(model.parameters())], lr=0.1)",
                ((1,), (2,), (2,)),
                gradients="torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
                changes=(
                    (1, "model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})"),
                    (2, "optimizer.load_state_dict(optimizer.state_dict())"),
                ),
            )
        },
    ),
]
ON_FOUR_RANKS = [
    (
        "self.register_buffer('l{i}', torch.zeros((), dtype=torch.long)): self.l{i}.add_(1)\nx = x *",
        {
            "recipe": Recipe(
                (
                    (
                        "self.register_buffer('l{i}', torch.zeros((), dtype=torch.long))",
                        "self.l{i}.add_(1)\nx = x * 1.01",
                    ),
                    ("self.l{i} = nn.Dropout(0.3)", "x = self.l{i}(x)"),
                    ("self.l{i} = nn.PReLU()", "x = self.l{i}(x)"),
                ),
                "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)",
                ((2,), (1,), (6,), (2,)),
                loss="loss = out[y > 0].pow(2).sum()",
                backward="loss.backward(torch.ones_like(loss))",
                gradients="torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)",
                result="return {'loss': loss.detach(), 'out': out.detach()}",
                changes=(
                    (1, "model.act = nn.PReLU()"),
                    (2, "model.head.register_forward_hook(lambda m, args, out: out * 0.5)"),
                    (3, "optimizer.state.clear()"),
                ),
                width=3,
                style="fully_shard",
                odd=(
                    "self.register_buffer('l{i}', torch.zeros((), dtype=torch.long)) # self.l{i}.add_(1)\nx = x * 1.01",
                    "model.act = nn.PReLU()",
                    "model.head.register_forward_hook(lambda m, args, out: out * 0.5)",
                    "optimizer.state.clear()",
                ),
            )
        },
    ),
    (
        "5 odd fragments, gradients: torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type=float('i",
        {
            "recipe": Recipe(
                (
                    (
                        "self.l{i} = nn.Linear(D, D)",
                        "x = F.linear(x, F.normalize(self.l{i}.weight.t()), self.l{i}.bias)",
                    ),
                    (
                        "self.l{i} = nn.Sequential(nn.Linear(D, D), nn.Tanh())",
                        "x = checkpoint(self.l{i}, x, use_reentrant=False)",
                    ),
                ),
                "torch.optim.AdamW([{'params': [p], 'lr': 0.01 * (k + 1)} for k, p in enumerate(model.parameters())], lr=0.1)",
                ((6, 3, 2, 4), (3,), (1,), (2,)),
                zeroing="optimizer.zero_grad(set_to_none=False)",
                backward="torch.autograd.backward(loss, inputs=[p for p in model.parameters() if p.requires_grad])",
                gradients="torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type=float('inf'))",
                changes=(
                    (1, "model.gain = 3.0"),
                    (2, "model.head.weight.data.mul_(0.5)"),
                    (3, "model.head.requires_grad_(False)"),
                ),
                bucket_mb=0.0001,
                odd=(
                    "torch.autograd.backward(loss, inputs=[p for p in model.parameters() if p.requires_grad])",
                    "torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type=float('inf'))",
                    "model.gain = 3.0",
                    "model.head.weight.data.mul_(0.5)",
                    "model.head.requires_grad_(False)",
                ),
            )
        },
    ),
]
