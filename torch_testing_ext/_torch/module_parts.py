"""The parameters that a module has itself."""

from typing import Any

from torch import nn


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module by name, None for those that it leaves out. `Module._parameters`: 2.11 to 2.15."""
    return module._parameters


def put_parameter(module: nn.Module, name: str, value: Any) -> None:
    """Register a parameter, also in the second list of weights that recurrent modules keep.

    `RNNBase._flat_weights`, `_flat_weights_names`: 2.11 to 2.15.
    """
    module._parameters[name] = value
    if isinstance(module, nn.RNNBase) and "_flat_weights" in module.__dict__:
        module._flat_weights = [module._parameters[n] for n in module._flat_weights_names]
