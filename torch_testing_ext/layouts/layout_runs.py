"""Runs of a training in the ranks of a layout, and the controls of the reference."""

from __future__ import annotations

import copyreg
import math
import os
import pickle
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext import launch
from torch_testing_ext._testing.bases.rank_accounts import refuse_what_ran_nothing
from torch_testing_ext._testing.bases.spawned_functions import need_of_devices, run_spawned
from torch_testing_ext._torch.compared_training import (
    compute_in_float64,
    drop_by_values,
    drop_nothing,
    import_what_training_uses,
)
from torch_testing_ext.layouts.layout_of_rank import Layout
from torch_testing_ext.layouts.layout_text import parse_axes
from torch_testing_ext.layouts.tensor_parts import bytes_of, copy_of_local, tensor_of_bytes
from torch_testing_ext.layouts.training_looks import SAMPLE, LayoutRun, RankLooks, Setup, TensorLook

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
__tracebackhide__ = True

Train = Callable[[Layout], Any]
_MOST_SAMPLES = 128
# The logarithm of how often two masks that were drawn apart are alike.
_RARE = math.log(1e-6)


def run_layout(train: Train, text: str, setup: Setup, case: launch.Case, targets: tuple[Any, ...] = ()) -> LayoutRun:
    """Train once in fresh ranks of this layout. Raises what its ranks raise."""
    __tracebackhide__ = True
    axes = parse_axes(text)
    size = math.prod(axes.values())
    import_what_training_uses()
    folder = tempfile.mkdtemp(dir=setup.folder)
    try:
        need = need_of_devices(setup.devices and size, size, None, case.name)
        run_spawned(_train, size, (train, axes, folder, setup), setup.timeout, None, need, case, targets or (train,))
        ranks = {rank: _read(folder, rank) for rank in range(size)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return LayoutRun.of_ranks(text, axes, ranks)


def _read(folder: str, rank: int) -> RankLooks:
    with open(_file_of(folder, rank), "rb") as file:
        record: RankLooks = pickle.load(file)
    return record


def _write(record: RankLooks, folder: str, rank: int) -> None:
    """Without torch.save, which asks about each of thousands of small objects: half of the time of a small training."""
    with open(_file_of(folder, rank), "wb") as file:
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced}
        pickler.dump(record)


def _file_of(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank{rank}.pickle")


def _reduced(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    return tensor_of_bytes, (bytes_of(tensor), tensor.dtype, tuple(tensor.shape))


def _train(rank: int, train: Train, axes: dict[str, int], folder: str, setup: Setup) -> None:
    """The body of a rank."""
    torch.manual_seed(setup.seed)
    torch.set_default_dtype(setup.dtype)
    torch.set_num_threads(1)
    began = time.process_time()
    layout = Layout(rank, axes, setup)
    if setup.is_float64:
        compute_in_float64()
        drop_by_values(_dropout_notes(layout))
    else:
        drop_nothing()
    refuse_what_ran_nothing(train(layout))
    layout.end()
    if setup.chunks and layout.samples * setup.chunks <= _MOST_SAMPLES:
        _train_on_each_sample(train, layout, axes, setup)
    record = layout.record_of_rank
    record.seconds = time.process_time() - began
    _write(record, folder, rank)
    if dist.is_initialized() and dist.get_world_size() > 1:
        # One that leaves early would break the connections of others.
        dist.barrier()


def _dropout_notes(layout: Layout) -> Callable[[torch.Tensor, torch.Tensor], None]:
    looks, calls = layout.record_of_rank.looks, [0]

    def note(input: torch.Tensor, mask: torch.Tensor) -> None:
        rounded = (copy_of_local(input).double() * 1e6).round() + 0.0
        own = copy_of_local(mask)
        digests = [zlib.crc32(bytes_of(each)) for each in (rounded, own)]
        kept = float(own.double().mean())
        # Two that are drawn apart are hardly ever alike, unless they are small.
        says_something = own.numel() * math.log(kept**2 + (1 - kept) ** 2) < _RARE
        digests.append(int(says_something))
        step = layout.record_of_rank.steps
        looks[step, "dropout", f"call {calls[0]}"] = TensorLook(torch.tensor(digests))
        calls[0] += 1

    return note


def _train_on_each_sample(train: Train, layout: Layout, axes: dict[str, int], setup: Setup) -> None:
    """Keep the gradients that each part of a sample of the first batch has alone."""
    for part in range(layout.samples * setup.chunks):
        alone = Layout(0, axes, setup)
        alone.only = part
        train(alone)
        for (step, kind, name), look in alone.record_of_rank.looks.items():
            if (step, kind) == (0, "grad"):
                layout.record_of_rank.looks[part, SAMPLE, name] = look
