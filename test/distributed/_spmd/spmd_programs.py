"""The strategy that writes random training programs out of fragments."""

from __future__ import annotations

import textwrap
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
    # A batch of one, which some modules refuse, comes to all ranks: DDP would hang if one of them raised.
    own_size = st.sampled_from([4, 3, 2, 5, 6, 8])
    sizes = tuple(draw(st.one_of(one_size.map(lambda n: (n,)), st.tuples(*[own_size] * 4))) for _ in range(calls))
    strange = tuple(" # ".join(filter(None, (f.init, f.code, f.setup))) for f in used if not f.plain)
    options = draw(
        st.sampled_from(
            [(), (), (), (("bucket_mb", 0.0001),), (("reshard_after_forward", True), ("bucket_mb", 0.0001))]
        )
    )
    return TrainingProgram(source, sizes, width, style, options, strange, not strange and draw(st.booleans()))
