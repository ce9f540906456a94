"""torch.compile: an attribute that was missing at the first call is not seen when the object gets it later.

If an object lacks an attribute, Dynamo traces the `__getattr__` of its class, or the `except AttributeError` around the
read, but installs no guard that the attribute is missing. So all later calls go the same way. `hasattr`, and `getattr`
with a default, are guarded; that helps if the class has no `__getattr__` that answers.

Seen on torch 2.11 to 2.15. patches/0015-dynamo-guard-missing-attribute.torch-2.15.patch
and the same for 2.15 correct it. Near: pytorch/pytorch#197859, which is open, and pytorch/pytorch#111522. Run this
file: it prints what each of two objects returns after its attribute was set, and exits with 1 if one is wrong.
"""

import sys
from typing import Any

import torch


class Computed:
    def __getattr__(self, name: str) -> float:
        return 2.0


def read(tensor: torch.Tensor, thing: Any) -> torch.Tensor:
    try:
        result: torch.Tensor = tensor * thing.scale
        return result
    except AttributeError:
        return tensor * 2


if __name__ == "__main__":
    compiled, got = torch.compile(read, backend="eager"), {}
    things: list[Any] = [Computed(), torch.nn.Module()]
    for thing in things:
        compiled(torch.ones(1), thing)
        thing.scale = 7.0
        got[type(thing).__name__] = compiled(torch.ones(1), thing).item()
    print(f"torch.compile returns {got}, and 7.0 is right", flush=True)
    sys.exit(set(got.values()) != {7.0})
