"""What the tests of this project do on a GPU, in ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def device():
    """The CPU only where there is no GPU: to try these tests."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize():
    if device() == "cuda":
        torch.cuda.synchronize()


def use_gpu(test):
    """In a rank of its own: make a group of NCCL and use it. Returns the tensor."""
    torch.cuda.set_device(0)
    store = dist.FileStore(test.file_name, 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    ours = torch.ones(2**20, device="cuda")
    dist.all_reduce(ours)
    torch.cuda.synchronize()
    return ours


def check_collectives(test):
    rank, size = dist.get_rank(), dist.get_world_size()
    ours = torch.full((4,), float(rank + 1), device=device())
    dist.all_reduce(ours)
    test.assertEqual(ours, torch.full((4,), size * (size + 1) / 2, device=device()))
    dist.broadcast(ours, size - 1)
    gathered = [torch.empty(2, device=device()) for _ in range(size)]
    dist.all_gather(gathered, torch.full((2,), float(rank), device=device()))
    test.assertEqual([int(one[0]) for one in gathered], list(range(size)))


def train(test):
    torch.manual_seed(0)
    model, reference = nn.Linear(64, 64, device=device()), nn.Linear(64, 64, device=device())
    reference.load_state_dict(model.state_dict())
    fully_shard(model)
    batch = torch.randn(8, 64, device=device())
    for module in (model, reference):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(batch).square().mean().backward()
        optimizer.step()
    test.assertEqual(model.weight.full_tensor(), reference.weight)
