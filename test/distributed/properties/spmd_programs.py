"""Writes training programs out of fragments, and draws random ones."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from spmd_fragments import HEADS, LAYERS, LOSSES, SIZES, Fragment
from spmd_step_fragments import (
    BACKWARD,
    BATCHES,
    CHANGES,
    GRADIENTS,
    OPTIMIZER_CLASSES,
    OPTIMIZERS,
    RESULTS,
    UPDATES,
    ZEROING,
)
from spmd_truth import TrainingProgram

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


@dataclass(frozen=True)
class Recipe:
    """The fragments of a training program, by value, and how it is called."""

    layers: tuple[tuple[str, str], ...]  # what each layer needs in __init__, and its code in forward
    size: str  # Python on sizes
    size_at: int | None  # the number of layers before it; None: in the step, before the model is called
    head: str
    loss: str
    optimizer: str
    sizes: tuple[tuple[int, ...], ...]  # of the batches of each call
    batch: str = "return x, y"
    setup: str = "x, y = batch"
    zeroing: str = "optimizer.zero_grad()"
    backward: str = "loss.backward()"
    gradients: str = "pass"
    update: str = "optimizer.step()"
    after: str = "pass"
    result: str = "return loss"
    changes: tuple[tuple[int, str], ...] = ()  # before which call, and the code
    width: int = 4
    style: str = "replicate"
    options: tuple[tuple[str, Any], ...] = ()
    odd: tuple[str, ...] = ()  # the fragments that are not of the mainstream
    fsdp: bool = False

    def program(self) -> TrainingProgram:
        numbered = [
            (init.replace("{i}", str(i)), code.replace("{i}", str(i))) for i, (init, code) in enumerate(self.layers)
        ]
        forward = [code for _, code in numbered]
        size = [self.size]
        if self.size_at is not None:
            forward.insert(self.size_at, self.size)
            size = []
        step = [
            self.setup, self.zeroing, *size, "out = model(x)", self.loss, self.backward, self.gradients, self.update,
            self.after, self.result,
        ]  # fmt: skip
        changes = [f"if call == {call}:\n{_indented([code], 1)}" for call, code in self.changes] or ["pass"]
        classes = "".join(text for name, text in OPTIMIZER_CLASSES.items() if name in self.optimizer)
        source = (
            PREAMBLE.format(width=self.width)
            + classes
            + TEMPLATE.format(
                init=_indented([init for init, _ in numbered], 3),
                forward=_indented([*forward, self.head], 3),
                optimizer=self.optimizer,
                step=_indented(step, 2),
                batch=_indented([self.batch], 2),
                change=_indented(changes, 2),
            )
        )
        return TrainingProgram(source, self.sizes, self.width, self.style, self.options, self.odd, self.fsdp)


@st.composite
def recipes(draw: Any, max_odd: int = 3) -> Recipe:
    """Recipes of random programs, most of whose fragments are of the mainstream."""
    width, style = draw(st.sampled_from([4, 3, 5])), draw(st.sampled_from(["replicate", "fully_shard"]))
    odd_sections = draw(st.lists(st.sampled_from(_ODD), max_size=max_odd, unique=True))
    used: list[Fragment] = []

    def pick(section: str, may_be_odd: bool = True) -> Fragment:
        is_odd = may_be_odd and section in odd_sections
        choices = [f for f in SECTIONS[section] if f.plain is not is_odd]
        used.append(draw(st.sampled_from(choices or SECTIONS[section])))
        return used[-1]

    layers = [pick("layers", number == 0) for number in range(draw(st.integers(1, 3)))]
    sizes_in_step = draw(st.booleans())
    size = pick("sizes").code.replace("self.training", "model.training" if sizes_in_step else "self.training")
    size_at = None if sizes_in_step else draw(st.integers(0, len(layers)))
    batch = pick("batch")
    head = pick("head")
    zeroing, loss, backward, gradients, update = map(pick, ("zeroing", "loss", "backward", "gradients", "update"))
    after = pick("after").code if "after" in odd_sections else "pass"
    result, optimizer = pick("result"), pick("optimizer")
    calls = draw(st.integers(3, 4))
    changes = {call: pick("changes").code for call in range(1, calls)}
    if "changes" not in odd_sections:
        changes = {call: code for call, code in changes.items() if draw(st.booleans())}
    one_size = st.sampled_from([4, 3, 2, 5, 6, 1, 8])
    # A batch of one, which some modules refuse, comes to all ranks: DDP would hang if one of them raised.
    own_size = st.sampled_from([4, 3, 2, 5, 6, 8])
    sizes = tuple(draw(st.one_of(one_size.map(lambda n: (n,)), st.tuples(*[own_size] * 4))) for _ in range(calls))
    strange = tuple(" # ".join(filter(None, (f.init, f.code, f.setup))) for f in used if not f.plain)
    options = draw(st.sampled_from([(), (), (), (("bucket_mb", 0.0001),)]))
    return Recipe(
        layers=tuple((f.init, f.code) for f in layers),
        size=size,
        size_at=size_at,
        head=head.code,
        loss=loss.code,
        optimizer=optimizer.code,
        sizes=sizes,
        batch=batch.code,
        setup=batch.setup,
        zeroing=zeroing.code,
        backward=backward.code,
        gradients=gradients.code,
        update=update.code,
        after=after,
        result=result.code,
        changes=tuple(changes.items()),
        width=width,
        style=style,
        options=options,
        odd=strange,
        fsdp=not strange and draw(st.booleans()),
    )
