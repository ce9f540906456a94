"""Whole worlds: seconds and memory by number of ranks, for a data-parallel step and a transformer in 3 dimensions.

python benchmarks/worlds.py [--ranks 64 256 1024 4096] [--programs data_parallel three_dimensions]
"""

import argparse
import resource
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_testing_ext.worlds import check_world

WIDTH, STAGES, BLOCKS = 16, 4, 4
TARGETS = {("data_parallel", 1024): 30.0, ("three_dimensions", 1024): 120.0}
MOST_BYTES = 2 << 30
# Of the seconds for a rank in the largest and in the smallest world.
MOST_GROWTH = 2.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs):
        given = self.norm(inputs)
        scores = torch.softmax(self.query(given) @ self.key(given).transpose(-1, -2), -1)
        inputs = inputs + self.out(scores @ self.value(given))
        return inputs + self.down(torch.relu(self.up(inputs)))


def data_parallel(rank, world_size):
    model = nn.parallel.DistributedDataParallel(Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, WIDTH)).sum().backward()
    optimizer.step()


def three_dimensions(rank, world_size):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tensor = 8
    shape = (world_size // STAGES // tensor, STAGES, tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp"))
    model = nn.Sequential(*(Block() for _ in range(BLOCKS // STAGES)))
    columns, rows = ("query", "key", "value", "up"), ("out", "down")
    plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    place, part = mesh["pp"].get_local_rank(), torch.ones(1, 4, WIDTH, requires_grad=True)
    shapes = {"input_args": (part,), "output_args": (part,)}
    stage = PipelineStage(model, place, STAGES, torch.device("cpu"), group=mesh["pp"].get_group(), **shapes)
    schedule = Schedule1F1B(stage, STAGES, loss_fn=lambda output, target: (output - target).sum())
    whole = torch.ones(STAGES, 4, WIDTH)
    inputs = (whole,) if place == 0 else ()
    target = {"target": whole} if place == STAGES - 1 else {}
    schedule.step(*inputs, **target)


def cpu_seconds():
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    programs = {"data_parallel": data_parallel, "three_dimensions": three_dimensions}
    parser.add_argument("--programs", nargs="+", choices=list(programs), default=list(programs))
    options = parser.parse_args()
    missed = []
    for name in options.programs:
        of_rank = {}
        for ranks in options.ranks:
            began, cpu = time.monotonic(), cpu_seconds()
            world = check_world(programs[name], ranks)
            seconds = time.monotonic() - began
            of_rank[ranks] = seconds / ranks
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            line = f"{name}, {ranks} ranks: {seconds:.1f} s, {1000 * of_rank[ranks]:.1f} ms a rank, {memory >> 20} MiB"
            line += f", {1000 * (cpu_seconds() - cpu) / ranks:.1f} ms of CPU a rank"
            print(f"{line}, {sum(world.calls())} calls, {len(world.classes)} classes", flush=True)
            if seconds > TARGETS.get((name, ranks), seconds) or memory > MOST_BYTES:
                missed.append(line)
        growth = of_rank[max(of_rank)] / of_rank[min(of_rank)]
        print(f"{name}: a rank costs {growth:.2f} times as much in the largest world as in the smallest", flush=True)
        if growth > MOST_GROWTH:
            missed.append(f"{name}: {growth:.2f}")
    for line in missed:
        print(f"missed: {line}")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
