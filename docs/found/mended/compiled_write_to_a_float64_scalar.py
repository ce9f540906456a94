"""torch.compile: a write to a 0-d tensor of float64 is lost.

Such a tensor on the CPU may stand for a Python float, so its fake tensor remembers a symbol for `item()`, and kept it
after a write. AOTAutograd then asks Dynamo to trace again without that float, and Dynamo removes every node that holds
the symbol and has no user but `item()`: also the write, which returns the tensor that it wrote to. For the same reason,
`item()` after a write returns the value before it, if `torch._dynamo.config.capture_scalar_outputs` is set.

Seen on torch 2.11 to 2.13 with aot_eager and inductor; 2.14 and 2.15 are right.
patches/old/0014-faketensor-item-after-a-write.torch-2.13.patch corrects it. Run this file: it prints the value after a
write, and exits with 1 if it is wrong.
"""

import sys

import torch


def step(weight: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
    scalar.mul_(3)
    return weight.sum()


if __name__ == "__main__":
    scalar = torch.tensor(2.0, dtype=torch.float64)
    torch.compile(step, backend="aot_eager")(torch.ones(3, requires_grad=True), scalar)
    print(f"after 2 * 3, the tensor holds {scalar.item()}, and 6.0 is right", flush=True)
    sys.exit(scalar.item() != 6)
