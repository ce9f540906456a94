"""A script that is meant for torchrun: it fits one number by data-parallel gradient descent, and prints it.

Run it: torchrun --nproc-per-node=2 examples/train.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weight = torch.zeros(1, requires_grad=True)
for _ in range(50):
    ((weight - dist.get_rank()) ** 2).sum().backward()  # the mean over two ranks is least at 0.5
    dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM)
    with torch.no_grad():
        weight -= 0.1 * weight.grad / dist.get_world_size()
    weight.grad = None
print(f"fitted {weight.item():.3f}")
dist.destroy_process_group()
