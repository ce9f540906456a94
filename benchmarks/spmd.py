"""Compare compiled train steps with DDP and FSDP2 in eager mode: time, tracing, memory.

    python benchmarks/spmd.py [--steps N] [--rounds N] [--world-sizes 2 1] [--quick] [--memory]

All variants take turns within one run, so that other load on the machine affects all of them. Compare ratios of
medians. CPU time is the time of the thread that calls the step; communication runs on other threads, whose time "all
CPU" includes. The last table has the targets (2 ranks). The exit code is 1 if one of them is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
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

from torch_testing_ext._torch.tracing import dispatch_mode_class
from torch_testing_ext.distributed._spmd import DataParallel, compile

Step = Callable[[], Any]
STYLES = ("replicate", "fully_shard")
BACKENDS = ("engine", "capture", "inductor")
MLP, DEEP, TRANSFORMER = "MLP", "12 x Linear 512", "4-layer transformer"
LARGE = (DEEP, TRANSFORMER)
TARGETS = [  # model, variant, compared with, bound of the ratio of wall times
    (MLP, "replicate engine", "DDP eager", 1.2),
    *((m, "replicate engine", "DDP eager", 1.05) for m in LARGE),
    *((m, "fully_shard engine", "FSDP2 eager", 0.8) for m in LARGE),
    *((m, "replicate capture", "DDP eager", 0.9) for m in LARGE),
    *((m, "fully_shard capture", "FSDP2 eager", 0.45) for m in LARGE),
]
FIRST_CALLS = (("engine", 5), ("capture", 60))  # at most so many steps of DDP
KINDS = {"wall": "wall", "cpu": "CPU", "all": "all CPU"}


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


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[int, ...]]], Callable[..., torch.optim.Optimizer]]] = {
    MLP: (mlp, sgd),
    DEEP: (deep, sgd),
    TRANSFORMER: (transformer, adamw),
}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    return loss


def names_of(backends: Sequence[str]) -> list[str]:
    """The ways to train."""
    return ["DDP eager", "FSDP2 eager", *(f"{style} {backend}" for style in STYLES for backend in backends)]


def variants(
    title: str, seconds: dict[str, list[float]], backends: Sequence[str], names: Sequence[str] = ()
) -> dict[str, Step]:
    """Return each way to train, warmed up, as a function without arguments.

    `seconds` gets the times of the first two calls of each: the second has the optimizer's states, and traces again.
    """
    make_model, make_optimizer = MODELS[title]
    steps: dict[str, Step] = {}
    for name in names or names_of(backends):
        torch.manual_seed(0)
        model, shape = make_model()
        batch = torch.randn(shape)
        step: Callable[..., Any] = train_step
        if name == "DDP eager":
            model = DistributedDataParallel(model)
        elif name == "FSDP2 eager":
            if title != MLP:  # one unit per layer, as usual for larger models; the MLP is one unit
                for layer in model:
                    if not isinstance(layer, nn.ReLU):
                        fully_shard(layer)
            fully_shard(model)
        else:
            style, backend = name.split()
            step = compile(parallel_mode=DataParallel(style), backend=backend)(train_step)  # type: ignore[arg-type]
        optimizer = make_optimizer(model.parameters())
        seconds[name] = []
        for _ in range(2):
            begin = time.perf_counter()
            step(model, optimizer, batch)
            seconds[name].append(time.perf_counter() - begin)
        steps[name] = lambda step=step, model=model, optimizer=optimizer, batch=batch: step(model, optimizer, batch)
    return steps


def measure(steps: dict[str, Step], count: int, rounds: int) -> dict[str, dict[str, float]]:
    clocks = {"wall": time.perf_counter, "cpu": time.thread_time, "all": time.process_time}
    times: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in clocks} for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            dist.barrier()
            begin = {kind: clock() for kind, clock in clocks.items()}
            for _ in range(count):
                step()
            for kind, clock in clocks.items():
                times[name][kind].append((clock() - begin[kind]) / count * 1e6)
    return {name: {kind: statistics.median(t) for kind, t in taken.items()} for name, taken in times.items()}


def rank_main(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{world}", world), rank=rank, world_size=world)
    results: dict[str, Any] = {}
    for title in options.models or MODELS:
        seconds: dict[str, list[float]] = {}
        steps = variants(title, seconds, options.backends)
        count = options.steps if title == MLP else max(options.steps // 20, 3)
        results[title] = {"times": measure(steps, count, options.rounds), "first": seconds}
    if rank == 0:
        Path(folder, f"results{world}").write_text(json.dumps(results))
    dist.destroy_process_group()


def show(world: int, results: dict[str, Any]) -> None:
    for title, found in results.items():
        times = found["times"]
        print(f"\n{title}, {world} ranks: microseconds per step, and ratios to DDP eager and FSDP2 eager")
        print(
            f"  {'':<22}" + "".join(f"{k:>10}{'DDP':>7}{'FSDP2':>7}" for k in KINDS.values()) + f"{'first calls':>16}"
        )
        for name, taken in times.items():
            columns = ""
            for kind in KINDS:
                ratios = (taken[kind] / times[other][kind] for other in ("DDP eager", "FSDP2 eager"))
                columns += f"{taken[kind]:>10.0f}" + "".join(f"{ratio:>7.2f}" for ratio in ratios)
            print(f"  {name:<22}{columns}" + "".join(f"{first:>6.2f} s" for first in found["first"][name]))


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


def memory_of(title: str, name: str) -> tuple[float, float]:
    """The MiB that a rank holds between calls, and at the peak of one: tensors of at least 64 KiB."""
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 64 * 1024)
    empty = large_blocks()
    step = variants(title, {}, [name.split()[1]], [name])[name]
    for _ in range(10):  # in the first of which the engine looks what the step reads
        step()
    dist.barrier()
    gc.collect()
    between = large_blocks()
    with MemorySampler() as sampler:
        step()
    return (between - empty) / 2**20, (sampler.peak - empty) / 2**20


def memory_main(rank: int, folder: str, title: str, name: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{title}{name}", 2), rank=rank, world_size=2)
    found = memory_of(title, name)
    if rank == 0:
        Path(folder, "memory").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure_memory(folder: str, title: str, name: str) -> Any:
    """The result of a measurement in ranks of its own: others leave memory behind."""
    mp.spawn(memory_main, (folder, title, name), nprocs=2)
    return json.loads(Path(folder, "memory").read_text())


def show_memory(folder: str, backends: Sequence[str]) -> None:
    print("\nMemory of one of 2 ranks, MiB: between calls, and at the peak of a call, with activations")
    for title in LARGE:
        print(f"  {title}")
        for name in names_of(backends):
            between, peak = measure_memory(folder, title, name)
            print(f"    {name:<22}{between:>8.1f}{peak:>8.1f}", flush=True)


def show_targets(results: dict[str, Any]) -> bool:
    rows = []
    for title, name, other, bound in TARGETS:
        if title in results and name in results[title]["times"]:
            times = results[title]["times"]
            rows.append((f"{title}: {name} / {other}", times[name]["wall"] / times[other]["wall"], bound))
    for title, (backend, bound) in itertools.product(LARGE, FIRST_CALLS):
        if title in results and f"replicate {backend}" in results[title]["first"]:
            found = results[title]
            first = max(found["first"][f"{style} {backend}"][0] for style in STYLES) * 1e6
            label = f"{title}: first call by {backend}, steps of DDP"
            rows.append((label, first / found["times"]["DDP eager"]["wall"], bound))
    print("\nTargets, 2 ranks")
    for title, value, bound in rows:
        print(f"  {title:<72}{value:>8.2f}  < {bound:<5g} {'met' if value < bound else 'MISSED'}")
    return all(value < bound for _, value, bound in rows)


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
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="default: all")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], help="the models to measure (default: all)")
    parser.add_argument("--memory", action="store_true", help="measure the memory only")
    parser.add_argument("--quick", action="store_true", help="few and short turns, as a smoke test")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds = 40, 3
    print(f"torch {torch.__version__}, CPU, gloo, one thread per rank")
    met = True
    with tempfile.TemporaryDirectory() as folder:
        if options.memory:
            show_memory(folder, options.backends)
            return 0
        for world in options.world_sizes:
            mp.spawn(rank_main, (world, folder, options), nprocs=world)
            results = json.loads(Path(folder, f"results{world}").read_text())
            show(world, results)
            if world == 2:
                met = show_targets(results)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
