"""Compare compiled train steps with DDP and FSDP2: time, first calls, memory.

    python benchmarks/spmd.py [--steps N] [--rounds N] [--world-sizes 2 1] [--models MODEL ...] [--quick]

All variants take turns within one run, so that other load on the machine affects all of them. Compare ratios of
medians. "Compiled" variants call `torch.compile` on the model inside the step. Memory is that of one rank between calls
and at the peak of a call, in ranks of their own. The exit code is 1 if a target (2 ranks) is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torch_testing_ext._torch.tensors.tensor_subclasses import dispatch_mode_class
from torch_testing_ext.distributed._spmd import DataParallel, compile
from torch_testing_ext.ranks import spawn

Step = Callable[[], Any]
MLP, DEEP, TRANSFORMER = "MLP", "12 x Linear 512", "4-layer transformer"
LARGE = (DEEP, TRANSFORMER)
DDP, FSDP2, REPLICATE, FULLY_SHARD = "DDP", "FSDP2", "replicate", "fully_shard"
COMPILED = ", compiled"
NAMES = (DDP, FSDP2, REPLICATE, FULLY_SHARD, DDP + COMPILED, REPLICATE + COMPILED, FULLY_SHARD + COMPILED)
TIME_TARGETS = [  # model, variant, compared with, bound of the ratio of wall times
    *((title, REPLICATE, DDP, 1.1) for title in LARGE),
    *((title, FULLY_SHARD, FSDP2, 0.7) for title in LARGE),
]
PEAK_TARGET = (TRANSFORMER, FULLY_SHARD, DDP, 0.8)
# At most so many steps of DDP.
FIRST_CALL = 5
# The number of steps whose least peak counts: buffers of gloo's threads only add to a peak.
MEMORY_STEPS = 8


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(50, 32), nn.ReLU(), nn.Linear(32, 8), nn.Sigmoid()), (128, 50)


def deep() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers), (32, 512)


def transformer() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(256, 64)), (4, 32, 256)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-4, momentum=0.9)


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-4)


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[int, ...]]], Callable[..., torch.optim.Optimizer]]] = {
    MLP: (mlp, sgd),
    DEEP: (deep, sgd),
    TRANSFORMER: (transformer, adam),
}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def shard_by_unit(model: Any) -> None:
    """Apply FSDP2 with a unit for each layer, as usual for larger models. The MLP is one unit."""
    for layer in model if len(model) > 4 else ():
        if not isinstance(layer, nn.ReLU):
            fully_shard(layer)
    fully_shard(model)


def variants(title: str, names: Sequence[str], first: dict[str, float]) -> dict[str, Step]:
    """Return each way to train, warmed up, as a function without arguments. `first` gets the time of its first call."""
    make_model, make_optimizer = MODELS[title]
    steps: dict[str, Step] = {}
    for name in names:
        torch.manual_seed(0)
        model, shape = make_model()
        batch = torch.randn(shape)
        step: Callable[..., Any] = train_step
        base = name.removesuffix(COMPILED)
        if name != base:
            model.compile()
        if base == DDP:
            model = DistributedDataParallel(model)
        elif base == FSDP2:
            shard_by_unit(model)
        else:
            step = compile(parallel_mode=DataParallel(base))(train_step)  # type: ignore[arg-type]
        optimizer = make_optimizer(model.parameters())
        begin = time.perf_counter()
        step(model, optimizer, batch)
        first[name] = time.perf_counter() - begin
        step(model, optimizer, batch)
        steps[name] = lambda step=step, model=model, optimizer=optimizer, batch=batch: step(model, optimizer, batch)
    return steps


def measure(steps: dict[str, Step], count: int, rounds: int) -> dict[str, float]:
    """The median time of a step of each, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                step()
            times[name].append((time.perf_counter() - begin) / count * 1e6)
    return {name: statistics.median(taken) for name, taken in times.items()}


def rank_main(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{world}", world), rank=rank, world_size=world)
    results: dict[str, Any] = {}
    names = [name for name in NAMES if not (options.quick and name.endswith(COMPILED))]
    for title in options.models or MODELS:
        first: dict[str, float] = {}
        steps = variants(title, names, first)
        count = options.steps if title == MLP else max(options.steps // 20, 3)
        results[title] = {"times": measure(steps, count, options.rounds), "first": first}
    if rank == 0:
        Path(folder, f"results{world}").write_text(json.dumps(results))
    dist.destroy_process_group()


def show(world: int, results: dict[str, Any]) -> None:
    for title, found in results.items():
        times = found["times"]
        print(f"\n{title}, {world} ranks: microseconds a step, its ratio to DDP and FSDP2, and the first call")
        for name, taken in times.items():
            ratios = "".join(f"{taken / times[peer]:>8.2f}" for peer in (DDP, FSDP2))
            print(f"  {name:<24}{taken:>10.0f}{ratios}{found['first'][name]:>8.2f} s")


# -- memory


class MallocInfo(ctypes.Structure):
    """glibc's `mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")]
    _fields_ += [(name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")]


def large_blocks() -> int:
    """The bytes of all blocks of this process that are large enough for a mapping of their own."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
    return int(mallinfo().hblkhd)


class MemorySampler(dispatch_mode_class()):  # type: ignore[misc]
    """Looks at the memory after each operation of torch."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, large_blocks())
        return result


def memory_main(rank: int, folder: str, title: str, name: str) -> None:
    """Write the MiB that rank 0 has between calls, and at the peak of one: tensors of at least 64 KiB."""
    torch.set_num_threads(1)
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 64 * 1024)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{title}{name}", 2), rank=rank, world_size=2)
    empty = large_blocks()
    step = variants(title, [name], {})[name]
    for _ in range(3):
        step()
    dist.barrier()
    gc.collect()
    between = large_blocks()
    peaks = []
    for _ in range(MEMORY_STEPS):
        with MemorySampler() as sampler:
            step()
        peaks.append(sampler.peak)
    if rank == 0:
        Path(folder, "memory").write_text(json.dumps([(each - empty) / 2**20 for each in (between, min(peaks))]))
    dist.destroy_process_group()


def memory_of(title: str, name: str) -> tuple[float, float]:
    """The MiB of a rank between calls and at the peak, in ranks of their own: others leave memory behind."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(memory_main, 2, folder, title, name)
        between, peak = json.loads(Path(folder, "memory").read_text())
    return between, peak


def show_memory() -> dict[str, dict[str, float]]:
    """Print the memory of the larger models, and return the peaks."""
    print("\nMemory of one of 2 ranks, MiB: between calls, and at the peak of a call, with activations")
    peaks: dict[str, dict[str, float]] = {}
    for title in LARGE:
        print(f"  {title}")
        for name in (DDP, FSDP2, REPLICATE, FULLY_SHARD):
            between, peak = memory_of(title, name)
            peaks.setdefault(title, {})[name] = peak
            print(f"    {name:<14}{between:>8.1f}{peak:>8.1f}", flush=True)
    return peaks


def show_targets(results: dict[str, Any], peaks: dict[str, dict[str, float]]) -> bool:
    rows = []
    for title, name, peer, bound in TIME_TARGETS:
        if title in results:
            times = results[title]["times"]
            rows.append((f"{title}: {name} / {peer}", times[name] / times[peer], bound))
    for title in (title for title in LARGE if title in results):
        found = results[title]
        slowest = max(found["first"][name] for name in (REPLICATE, FULLY_SHARD)) * 1e6
        rows.append((f"{title}: first call, steps of DDP", slowest / found["times"][DDP], FIRST_CALL))
    title, name, peer, bound = PEAK_TARGET
    if peaks:
        rows.append((f"{title}: peak of {name} / {peer}", peaks[title][name] / peaks[title][peer], bound))
    print("\nTargets, 2 ranks")
    for title, value, bound in rows:
        print(f"  {title:<64}{value:>8.2f}  <= {bound:<5g} {'met' if value <= bound else 'MISSED'}")
    return all(value <= bound for _, value, bound in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="steps of the MLP per turn (default: %(default)s; larger models run 1/20 of it)",
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns per variant (default: %(default)s)")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 1], help="numbers of ranks (default: 2 1)")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], help="the models to measure (default: all)")
    parser.add_argument("--quick", action="store_true", help="few and short turns, nothing compiled: a smoke test")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds = 40, 3
    print(f"torch {torch.__version__}, CPU, gloo, one thread per rank")
    peaks = show_memory()
    met = True
    with tempfile.TemporaryDirectory() as folder:
        for world in options.world_sizes:
            mp.spawn(rank_main, (world, folder, options), nprocs=world)
            results = json.loads(Path(folder, f"results{world}").read_text())
            show(world, results)
            if world == 2:
                met = show_targets(results, peaks)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
