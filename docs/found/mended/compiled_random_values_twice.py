"""torch.compile: two random operations with the same arguments become one, in a function that needs gradients.

The pass that merges equal operations of a joint graph (`fx_graph_cse`) spares only the random operations in a list, and
randn_like, randint_like, normal_, uniform_, exponential_ and rrelu are missing there. Both calls then return the same
values, and all later random values differ from eager's, because the generator advances once. With inductor, which
replaces most of these before that pass, normal_, uniform_, torch.normal and rrelu are merged.

Seen on torch 2.11 to 2.13; 2.14 and 2.15 are right.
patches/old/0013-aotautograd-cse-random-operations.torch-2.13.patch corrects it. Known as pytorch/pytorch#172206.
Run this file: it prints the difference of two draws, and exits with 1 if there is none.
"""

import sys

import torch


def difference(weight: torch.Tensor) -> torch.Tensor:
    return (weight * (torch.randn_like(weight) - torch.randn_like(weight))).sum()


if __name__ == "__main__":
    weight = torch.ones(3, requires_grad=True)
    torch.manual_seed(1)
    right = difference(weight).item()
    torch.manual_seed(1)
    got = torch.compile(difference, backend="aot_eager")(weight).item()
    print(f"torch.compile returns {got}, and {right} is right", flush=True)
    sys.exit(got != right)
