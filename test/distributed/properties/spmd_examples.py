"""The examples of test_spmd_properties.py, by value; choose_examples.py chose them.

Those that a rank cannot run at all were dropped, and of those that are refused at once all but a few.
"""

# ruff: noqa: E501 (a fragment is easier to compare with others on one line)

from spmd_programs import Recipe

ON_TWO_RANKS = [
    (
        "5 odd fragments, before a call: optimizer.param_groups[0]['lr'] = torch.tensor(0.05), update: optimizer.step()\noptimizer.zero_grad(set_to_none=False)",
        {
            "recipe": Recipe(
                (
                    ("self.l{i} = nn.LSTM(D, D, batch_first=True)", "x = self.l{i}(x.unsqueeze(1))[0][:, -1]"),
                    ("self.l{i} = nn.Bilinear(D, D, D)", "x = self.l{i}(x, x)"),
                    ("self.l{i} = types.SimpleNamespace(a=1.5)", "x = x * self.l{i}.a"),
                ),
                "x = x[torch.randperm(x.shape[0])]",
                None,
                "x = x @ self.head.weight.T + (0 if self.head.bias is None else self.head.bias)",
                "loss = (out - y).pow(2).mean() + 0.1 * sum(p.pow(2).sum() for p in model.parameters())",
                "torch.optim.AdamW(model.parameters(), lr=0.01)",
                ((2, 5, 8, 5), (3,), (1,), (8, 4, 2, 2)),
                batch="return x, y, x[0]",
                setup="x, y, k = batch\nx = x + k",
                zeroing="optimizer.zero_grad(set_to_none=False)",
                backward="(loss * 0.5).backward()",
                update="optimizer.step()\noptimizer.zero_grad(set_to_none=False)",
                result="return {'loss': loss, 'out': out}",
                changes=(
                    (1, "model.act = nn.ReLU()"),
                    (2, "optimizer.param_groups[0]['lr'] = torch.tensor(0.05)"),
                    (3, "model.options['gain'] = 3.0"),
                ),
                odd=(
                    "x = x @ self.head.weight.T + (0 if self.head.bias is None else self.head.bias)",
                    "optimizer.step()\noptimizer.zero_grad(set_to_none=False)",
                    "model.act = nn.ReLU()",
                    "optimizer.param_groups[0]['lr'] = torch.tensor(0.05)",
                    "model.options['gain'] = 3.0",
                ),
            )
        },
    ),
    (
        "size: x = x * (1.0 / len(x)), update: optimizer.step()\nfor e, p in zip(averages, model.parameters()):\n    e.lerp_(p.detach(), 0.1), backward: torch.autograd.backward(loss, inputs=[p for p in model.parameters() if p.requires_grad])",
        {
            "recipe": Recipe(
                (
                    ("self.l{i} = types.SimpleNamespace(a=1.5)", "x = x * self.l{i}.a"),
                    ("self.l{i} = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))", "x = self.l{i}(x)"),
                    (
                        "self.l{i} = nn.ParameterList([torch.randn(D), torch.randn(2, 3)])",
                        "x = sum(p.sum() for p in self.l{i}) * x",
                    ),
                ),
                "x = x * (1.0 / len(x))",
                1,
                "x = self.head(x)",
                "loss = F.cross_entropy(out, y.argmax(-1))",
                "torch.optim.Adam(model.parameters(), lr=0.01)",
                ((3, 4, 4, 8), (3, 5, 2, 5), (5,), (5, 8, 3, 4)),
                zeroing="pass",
                backward="torch.autograd.backward(loss, inputs=[p for p in model.parameters() if p.requires_grad])",
                gradients="torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
                update="optimizer.step()\nfor e, p in zip(averages, model.parameters()):\n    e.lerp_(p.detach(), 0.1)",
                result="return None",
                changes=((2, "optimizer.param_groups[-1]['weight_decay'] = 0.2"), (3, "model.train()")),
                width=5,
                style="fully_shard",
                options=(("bucket_mb", 0.0001),),
                odd=(
                    "torch.autograd.backward(loss, inputs=[p for p in model.parameters() if p.requires_grad])",
                    "optimizer.step()\nfor e, p in zip(averages, model.parameters()):\n    e.lerp_(p.detach(), 0.1)",
                ),
            )
        },
    ),
    (
        "gradients: for p in model.parameters():\n    if p.grad is not None:\n        p.grad.div_(p.grad.norm() + 1), before a call: for m in model.modules():\n    if isinstance(m, nn.BatchNorm1d):\n        m.momentum = 0.5, self.l{i} = nn.Linear(D, D): x = self.l{i}(x) / math.sqrt(self.l{i}.weight.shape[0])",
        {
            "recipe": Recipe(
                (("self.l{i} = nn.Linear(D, D)", "x = self.l{i}(x) / math.sqrt(self.l{i}.weight.shape[0])"),),
                "x = torch.cat([x[: len(x) // 2], x[len(x) // 2 :]])",
                None,
                "x = self.head(x)",
                "loss = F.mse_loss(out, y)",
                "torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)",
                ((4,), (4,), (4,)),
                batch="return x, y, (x > 0)",
                setup="x, y, k = batch\nx = torch.where(k, x, -x)",
                gradients="for p in model.parameters():\n    if p.grad is not None:\n        p.grad.div_(p.grad.norm() + 1)",
                result="return {'loss': loss, 'out': out}",
                changes=(
                    (1, "for m in model.modules():\n    if isinstance(m, nn.BatchNorm1d):\n        m.momentum = 0.5"),
                    (2, "model.options['gain'] = 3.0"),
                ),
                width=5,
                odd=(
                    "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.div_(p.grad.norm() + 1)",
                    "for m in model.modules():\n    if isinstance(m, nn.BatchNorm1d):\n        m.momentum = 0.5",
                    "model.options['gain'] = 3.0",
                ),
            )
        },
    ),
    (
        "before a call: model.gain = 3.0, self.l{i} = nn.Parameter(torch.randn(())): x = x * self.l{i}, backward: torch.autograd.backward([loss, out.sum()])",
        {
            "recipe": Recipe(
                (
                    ("self.l{i} = nn.Parameter(torch.randn(()))", "x = x * self.l{i}"),
                    ("self.l{i} = nn.Linear(D, D, bias=False)", "x = torch.tanh(self.l{i}(x))"),
                    ("self.l{i} = nn.BatchNorm1d(D)", "x = self.l{i}(x)"),
                ),
                "x = x + 0.1 * torch.randn_like(x)",
                3,
                "x = self.head(x)",
                "loss = torch.logsumexp(out, 0).mean() + out.var()",
                "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)",
                ((4,), (3, 3, 4, 5), (4,)),
                batch="return x.numpy(), y.numpy()",
                setup="x, y = map(torch.from_numpy, batch)",
                backward="torch.autograd.backward([loss, out.sum()])",
                gradients="norm = sum(p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None)",
                changes=(
                    (1, "model.gain = 3.0"),
                    (
                        2,
                        "model.head = nn.Linear(D, D)\noptimizer.add_param_group({'params': list(model.head.parameters())})",
                    ),
                ),
                width=3,
                style="fully_shard",
                odd=(
                    "return x.numpy(), y.numpy() # x, y = map(torch.from_numpy, batch)",
                    "torch.autograd.backward([loss, out.sum()])",
                    "model.gain = 3.0",
                    "model.head = nn.Linear(D, D)\noptimizer.add_param_group({'params': list(model.head.parameters())})",
                ),
            )
        },
    ),
]
OF_THE_MAINSTREAM = [
    (
        "self.l{i} = nn.Dropout(0.3): x = self.l{i}(x), optimizer: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9), self.l{i} = nn.TransformerEncoderLayer(D, 1, 8, dropout=0.0, batch_first=True): x = self.l{i}(x.unsqueeze(1)).squeeze(1)",
        {
            "recipe": Recipe(
                (
                    ("self.l{i} = nn.Dropout(0.3)", "x = self.l{i}(x)"),
                    (
                        "self.l{i} = nn.TransformerEncoderLayer(D, 1, 8, dropout=0.0, batch_first=True)",
                        "x = self.l{i}(x.unsqueeze(1)).squeeze(1)",
                    ),
                    ("self.l{i} = nn.LayerNorm(D)", "x = self.l{i}(x)"),
                ),
                "x = x.flatten().view(-1, D)",
                0,
                "x = self.head(x)",
                "loss = torch.logsumexp(out, 0).mean() + out.var()",
                "torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)",
                ((1,), (3, 6, 6, 3), (8,), (3,)),
                setup="x, y = batch\nx.mul_(2)",
                zeroing="for p in model.parameters():\n    p.grad = None",
                result="return {'loss': loss, 'out': out}",
                changes=((2, "optimizer.param_groups[0]['lr'] *= 0.5"), (3, "optimizer.zero_grad(set_to_none=False)")),
                width=5,
                style="fully_shard",
                options=(("bucket_mb", 0.0001),),
            )
        },
    ),
    (
        "self.l{i} = nn.Linear(D, D): x = self.l{i}(x) / math.sqrt(self.l{i}.weight.shape[0]), self.l{i} = nn.Linear(D, D): x = F.linear(x, self.l{i}.weight.t(), self.l{i}.bias), size: x = x / (1 + x.norm())",
        {
            "recipe": Recipe(
                (
                    ("self.l{i} = nn.Linear(D, D)", "x = F.linear(x, self.l{i}.weight.t(), self.l{i}.bias)"),
                    ("self.l{i} = nn.GRU(D, D, batch_first=True)", "x = self.l{i}(x.unsqueeze(1))[0][:, -1]"),
                    ("self.l{i} = nn.Linear(D, D)", "x = self.l{i}(x) / math.sqrt(self.l{i}.weight.shape[0])"),
                ),
                "x = x / (1 + x.norm())",
                3,
                "x = self.head(x)",
                "loss = F.cross_entropy(out, y.argmax(-1))",
                "torch.optim.Adam(model.parameters(), lr=0.01, fused=True)",
                ((4, 8, 8, 3), (5,), (4, 3, 4, 3), (5,)),
                gradients="torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)",
                changes=((2, "pass"), (3, "optimizer.load_state_dict(optimizer.state_dict())")),
                width=3,
                style="fully_shard",
                fsdp=True,
            )
        },
    ),
    (
        "loss: loss = (out - y).sum(), size: x = x + torch.ones(len(x), D), batch: return x, y, (x > 0)",
        {
            "recipe": Recipe(
                (("self.l{i} = nn.Linear(D, D).requires_grad_(False)", "x = self.l{i}(x)"),),
                "x = x + torch.ones(len(x), D)",
                None,
                "x = self.head(x)",
                "loss = (out - y).sum()",
                "torch.optim.SGD(model.parameters(), lr=0.1)",
                ((4,), (4,), (3,)),
                batch="return x, y, (x > 0)",
                setup="x, y, k = batch\nx = torch.where(k, x, -x)",
                zeroing="pass",
                gradients="norm = sum(p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None)",
                result="return None",
                changes=(
                    (
                        2,
                        "model.load_state_dict({k: v * 0.5 + 0.1 if v.is_floating_point() else v for k, v in model.state_dict().items()})",
                    ),
                ),
                style="fully_shard",
                fsdp=True,
            )
        },
    ),
    (
        "loss: loss = F.binary_cross_entropy_with_logits(out, y.sigmoid()), self.l{i} = nn.Embedding(D, D): x = x + self.l{i}(x.argmax(-1)), optimizer: torch.optim.NAdam(model.parameters(), lr=0.01)",
        {
            "recipe": Recipe(
                (
                    ("self.l{i} = nn.Parameter(torch.randn(()))", "x = x * self.l{i}"),
                    ("self.l{i} = nn.Embedding(D, D)", "x = x + self.l{i}(x.argmax(-1))"),
                    (
                        "self.l{i} = nn.ModuleList([nn.Linear(D, D)] * 2)",
                        "for layer in self.l{i}:\n    x = torch.relu(layer(x))",
                    ),
                ),
                "x = x[torch.randperm(x.shape[0])]",
                0,
                "x = self.head(x)",
                "loss = F.binary_cross_entropy_with_logits(out, y.sigmoid())",
                "torch.optim.NAdam(model.parameters(), lr=0.01)",
                ((6, 4, 4, 3), (4,), (3,)),
                batch="return x, y, {'kind': 'a' if len(x) > 3 else 'b'}",
                setup="x, y, k = batch\nx = x * (2 if k['kind'] == 'a' else 3)",
                gradients="torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
                result="return {'loss': loss, 'out': out}",
                changes=((1, "optimizer.param_groups[-1]['weight_decay'] = 0.2"),),
                width=3,
                fsdp=True,
            )
        },
    ),
]
ON_FOUR_RANKS = [
    (
        "self.l{i} = nn.Linear(D, D).requires_grad_(False): x = self.l{i}(x), self.l{i} = nn.Parameter(torch.randn(D)): x = x * self.l{i} + 1, before a call: optimizer.param_groups[-1]['weight_decay'] = 0.2",
        {
            "recipe": Recipe(
                (
                    ("self.l{i} = nn.Linear(D, D, bias=False)", "x = torch.tanh(self.l{i}(x))"),
                    ("self.l{i} = nn.Parameter(torch.randn(D))", "x = x * self.l{i} + 1"),
                    ("self.l{i} = nn.Linear(D, D).requires_grad_(False)", "x = self.l{i}(x)"),
                ),
                "x = x + torch.ones(len(x), D)",
                3,
                "x = self.head(x)",
                "loss = F.cross_entropy(out, y.argmax(-1))",
                "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, maximize=True, dampening=0.1)",
                ((2,), (8, 4, 8, 2), (3,), (3, 6, 2, 4)),
                gradients="torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)",
                result="return loss, out.detach().mean()",
                changes=(
                    (1, "optimizer.param_groups[-1]['weight_decay'] = 0.2"),
                    (2, "optimizer.param_groups[0]['lr'] *= 0.5"),
                    (3, "optimizer.load_state_dict(optimizer.state_dict())"),
                ),
                width=3,
                style="fully_shard",
                options=(("bucket_mb", 0.0001),),
                fsdp=True,
            )
        },
    ),
    (
        "before a call: losses.clear(), result: return Pair(loss, out), size: x = torch.where(x > 0, x, 0.1 * x)",
        {
            "recipe": Recipe(
                (
                    (
                        "self.l{i} = nn.ParameterList([torch.randn(D), torch.randn(2, 3)])",
                        "x = sum(p.sum() for p in self.l{i}) * x",
                    ),
                    ("self.l{i} = dict(a=[1.5])", "x = x * self.l{i}['a'][0]"),
                ),
                "x = torch.where(x > 0, x, 0.1 * x)",
                None,
                "x = self.head(x)",
                "loss = F.kl_div(out.log_softmax(-1), y.softmax(-1), reduction='batchmean')",
                "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)",
                ((6,), (5,), (6,)),
                setup="x, y = batch\nx.mul_(2)",
                zeroing="model.zero_grad()",
                gradients="norm = sum(p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None)",
                result="return Pair(loss, out)",
                changes=((1, "torch.manual_seed(3)"), (2, "losses.clear()")),
                width=3,
                style="fully_shard",
                options=(("bucket_mb", 0.0001),),
                odd=("return Pair(loss, out)", "torch.manual_seed(3)", "losses.clear()"),
            )
        },
    ),
]
