"""Probes of the collectives of threads: what each leaves in the tensors of all ranks."""

import torch
import torch.distributed as dist
from probes import PROBES, attempt, probe


def tensors(rank, count, size=2):
    return [torch.arange(size, dtype=torch.float32) + 10 * rank + 100 * index for index in range(count)]


def _work_probe(name, make_data, *arguments):
    def run(kit):
        data = [make_data(rank) for rank in range(3)]
        getattr(kit, name)(*arguments).work(data)
        return repr(data)

    PROBES[f"{name} {len(PROBES)}"] = run


def output(count=None):
    return torch.zeros(2) if count is None else [torch.zeros(2) for _ in range(count)]


for _op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
    _work_probe("AllReduce", lambda rank: tensors(rank, 2), dist.ReduceOp(_op))
for _op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
    _work_probe("ReduceScatter", lambda rank: ([output()], [tensors(rank, 3)]), _op)
_work_probe("AllGather", lambda rank: ([output(3)], tensors(rank, 1)))
_work_probe("Scatter", lambda rank: ([output()], [tensors(rank, 3)] if rank == 1 else []), 1)
_work_probe("Gather", lambda rank: ([output(3)] if rank == 2 else [], tensors(rank, 1)), 2)
_work_probe("Broadcast", lambda rank: [tensors(rank, 2), tensors(rank, 1)], 1)
_work_probe("AllToAll", lambda rank: (output(3), tensors(rank, 3)))
_work_probe("AllToAllBase", lambda rank: (torch.zeros(6), torch.arange(6.0) + 10 * rank, None, []))
_work_probe("AllToAllBase", lambda rank: (torch.zeros(3 * rank), torch.arange(3.0) + 10 * rank, [rank] * 3, [0, 1, 2]))


@probe
def helpers_of_collectives(kit):
    parts = [torch.tensor([1, 6]), torch.tensor([5, 3])]
    work = kit.ret_work("done")
    return [
        repr(kit.binop_reduce(parts, torch.sum)),
        repr(kit.binop_reduce(parts, torch.max)),
        repr(kit.bitwise_reduce(parts, torch.bitwise_or)),
        kit.flatten_list([1, [2, (3,)]]),
        work.wait(),
        work.get_future().value(),
        attempt(kit.AllReduce, type("Unknown", (), {"op": 77})()),
    ]
