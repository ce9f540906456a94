"""The parameters that a module has itself."""

from typing import Any

import torch
from torch import nn

# The attributes that every module has, and those of recurrent ones: 2.11 to 2.15.
OWN_OF_MODULES = frozenset((*vars(nn.Module()), "_flat_weights"))


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module by name, None for those that it leaves out. `Module._parameters`: 2.11 to 2.15."""
    return module._parameters


def count_as_parameter(tensor: torch.Tensor, does: bool) -> None:
    """Let a tensor of another class be an `nn.Parameter` for `isinstance`, or no longer. `_is_param`: 2.11 to 2.15."""
    if does:
        vars(tensor)["_is_param"] = True
    else:
        vars(tensor).pop("_is_param", None)


def put_parameter(module: nn.Module, name: str, value: Any) -> None:
    """Register a parameter, also in the second list of weights that recurrent modules keep.

    `RNNBase._flat_weights`, `_flat_weights_names`: 2.11 to 2.15.
    """
    module._parameters[name] = value
    if isinstance(module, nn.RNNBase) and "_flat_weights" in module.__dict__:
        module._flat_weights = [module._parameters[n] for n in module._flat_weights_names]
