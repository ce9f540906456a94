"""Train steps on GPUs: ours against DDP and FSDP2 in eager mode, for the check spmd-speed.

Each variant trains the same model from the same weights on the same batches. With one rank the group is NCCL's; with
two, each has a GPU of its own, or they share one over NCCL or gloo, as the versions allow.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_testing_ext._torch.devices import cuda_state

# Width, layers, batch, and how many steps are timed together. gloo's go through the CPU.
ON_GPU, OVER_GLOO, ON_CPU = (2048, 12, 512, 30), (1024, 12, 512, 1), (64, 3, 8, 1)
STYLES = ("replicate", "fully_shard")
# The model is compiled by torch.compile.
COMPILED = "compiled"
PEERS = {"replicate": "DDP eager", "fully_shard": "FSDP2 eager"}


def measure(c: Any) -> None:
    """All of it."""
    for world in (1, 2):
        group, devices, why = group_for(world)
        where = f"{world} rank{'s' if world > 1 else ''}"
        c.note(f"{where} on {devices} GPU{'s' if devices != 1 else ''} over {group}{why}")
        context = torch.multiprocessing.spawn(
            rank_main, (world, group, str(c.folder), c.quick), nprocs=world, join=False
        )
        said: set[str] = set()
        try:
            while not context.join(timeout=1):
                say_new(c, world, said, where)
        except Exception as error:
            c.expect(False, f"{where} train to the end", str(error).strip()[-600:])
        say_new(c, world, said, where)
        c.expect(said >= set(PEERS.values()), f"DDP and FSDP2 train, {where}", sorted(said))


def say_new(c: Any, world: int, said: set[str], where: str) -> None:
    """Say what is known of variants by now: a later one may hang."""
    with suppress(OSError, ValueError):
        for name, found in json.loads((c.folder / f"results{world}.json").read_text()).items():
            if name not in said:
                said.add(name)
                say(c, name, found, where)


def group_for(world: int) -> tuple[str, int, str]:
    """The backend for so many ranks, the number of GPUs that they use, and a remark."""
    from torch_testing_ext._machine.device_sharing import shared_backend

    devices = torch.cuda.device_count()
    if not devices:
        return "gloo", 0, ", on the CPU"
    if devices >= world:
        return "nccl", world, ""
    return shared_backend(tuple(torch.cuda.nccl.version()), torch.version.hip is not None), devices, ", shared"


def say(c: Any, name: str, found: dict[str, Any], where: str) -> None:
    if "error" in found:
        c.expect(False, f"{name} trains, {where}", found["error"])
        return
    c.figure(f"{where}: {name}: step", found["step"] * 1e3, "ms")
    c.figure(f"{where}: {name}: kernels in a step", found["kernels"])
    c.figure(f"{where}: {name}: time of communication that overlaps computation", found["overlap"], "%")
    c.figure(f"{where}: {name}: first calls", found["first"], "s")
    if "graph" in found:
        c.note(f"{where}: {name}: in a CUDA graph: {found['graph']}")
    if "difference" in found:
        c.expect(found["difference"] < 1e-2, f"{name} trains like {found['peer']}, {where}", found["difference"])


def rank_main(rank: int, world: int, group: str, folder: str, quick: bool) -> None:
    if group == "nccl" and torch.cuda.device_count() < world:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if torch.cuda.device_count():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if group == "gloo":
            cuda_state.gather_lists_one_by_one()
    dist.init_process_group(group, store=dist.FileStore(f"{folder}/store{world}", world), rank=rank, world_size=world)
    results: dict[str, Any] = {}
    weights: dict[str, list[torch.Tensor]] = {}
    for name in (*PEERS.values(), *STYLES, *(f"{style} {COMPILED}" for style in STYLES)):
        try:
            results[name], weights[name] = train(name, quick)
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}".strip()[:1500]}
        peer = PEERS.get(name.split()[0])
        if peer in weights and name in weights:
            results[name].update(peer=peer, difference=difference(weights[name], weights[peer]))
        if rank == 0:
            draft = Path(folder, "draft")
            draft.write_text(json.dumps(results))
            draft.replace(Path(folder, f"results{world}.json"))
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The largest difference of weights, relative to the largest weight."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


def train(name: str, quick: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.device_count() else "cpu"
    width, count, rows, timed = ON_CPU if device == "cpu" else OVER_GLOO if dist.get_backend() == "gloo" else ON_GPU
    layers = [layer for _ in range(count) for layer in (nn.Linear(width, width, device=device), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers)
    step, model = variant(name, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(rows, width, device=device)

    def call() -> Any:
        return step(model, optimizer, batch)

    began = time.perf_counter()
    for _ in range(3):
        call()
    synchronize()
    found: dict[str, Any] = {"first": time.perf_counter() - began}
    weights = [whole(parameter.detach()).clone() for parameter in model.parameters()]
    found["step"] = seconds_of(call, min(timed, 10) if quick else timed)
    found.update(profiled(call))
    if device == "cuda" and dist.get_world_size() == 1 and name.startswith(STYLES):
        found["graph"] = in_a_graph(call)
    return found, weights


def variant(name: str, model: nn.Module) -> tuple[Callable[..., Any], nn.Module]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from torch_testing_ext.distributed._spmd import DataParallel, compile

    if name == "DDP eager":
        return train_step, DistributedDataParallel(model)
    if name == "FSDP2 eager":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        return train_step, model
    style, *compiled = name.split()
    if compiled:
        model.compile()
    return compile(parallel_mode=DataParallel(style))(train_step), model


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def synchronize() -> None:
    if torch.cuda.device_count():
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], count: int) -> float:
    taken = []
    for _ in range(5 if torch.cuda.device_count() else 1):
        synchronize()
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
        began = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        taken.append((time.perf_counter() - began) / count)
    return statistics.median(taken)


def profiled(call: Callable[[], Any], steps: int = 3) -> dict[str, Any]:
    """How many kernels a step has, and which part of the time of its communication overlaps its computation."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.device_count() else [])]
    with profile(activities=activities) as trace:
        for _ in range(steps):
            call()
        synchronize()
    kernels, communication = [], []
    for event in trace.events():
        span = (event.time_range.start, event.time_range.end)
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if event.name.startswith("gloo:") or (on_device and "nccl" in event.name.lower()):
            communication.append(span)
        elif on_device and not event.name.lower().startswith(("memcpy", "memset")):
            kernels.append(span)
    busy = total(joined(communication))
    both = busy + total(joined(kernels)) - total(joined(communication + kernels))
    return {"kernels": len(kernels) / steps, "overlap": 100 * both / busy if busy else 0.0}


def joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times that any of the spans covers."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def total(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def in_a_graph(call: Callable[[], Any]) -> str:
    """The time of a step that is replayed, or why it cannot be captured."""
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        return f"{seconds_of(graph.replay, 10) * 1e3:.3f} ms a step"
    except Exception as error:
        return f"not captured: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
