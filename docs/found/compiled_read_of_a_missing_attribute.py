"""torch.compile: an attribute that was missing at the first call is not seen when the object gets it later.

If an object lacks an attribute, Dynamo traces the `__getattr__` of its class, or the `except AttributeError` around the
read, without a guard that the attribute is missing. So all later calls go the same way. `hasattr` and `getattr` with a
default are guarded, if the class has no `__getattr__`.

Seen on torch 2.11.0, 2.12.0, 2.13.0, 2.14.0 and 2.15.0, with any backend.
patches/0015-dynamo-guard-missing-attribute.torch-2.15.patch corrects it. Run this file: it prints what each way of
reading returns after the attribute was set, and exits with 1 if one is wrong.
"""

import sys

import torch


class Computed:
    def __getattr__(self, name: str) -> float:
        return 2.0


class Missing(torch.nn.Module):
    """Its `__getattr__` is that of modules, which raises."""


def read(tensor: torch.Tensor, thing: Computed | Missing) -> torch.Tensor:
    try:
        return tensor * thing.scale
    except AttributeError:
        return tensor * 2


if __name__ == "__main__":
    compiled, got = torch.compile(read, backend="eager"), {}
    for thing in (Computed(), Missing()):
        compiled(torch.ones(1), thing)
        thing.scale = 7.0  # type: ignore[assignment]
        got[type(thing).__name__] = compiled(torch.ones(1), thing).item()
    print(f"torch.compile returns {got}, and 7.0 is right", flush=True)
    sys.exit(set(got.values()) != {7.0})
