"""Code generation: turns a graph into a Python function that calls operations with minimal overhead.

`GraphModule.forward` looks up every operation through four attributes and calls it through a wrapper. Here each
operation is bound once, in its fastest form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_testing_ext._torch.spmd import raw_operation

aten = torch.ops.aten
_OPERATION = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)\(")
# The generated Python bindings parse plain arguments faster than the dispatcher's generic call. These take exactly the
# schema's arguments in the schema's order.
_FUNCTIONS = "t mm bmm addmm relu sigmoid tanh sqrt cat"
_OF_TENSORS = "add sub mul div"
_OVERLOADS = {
    "default": {name: getattr(torch, name) for name in _FUNCTIONS.split()}
    | {name: getattr(torch.Tensor, name) for name in ("addcmul_", "addcdiv_", "view", "expand")},
    "Tensor": {name: getattr(torch, name) for name in _OF_TENSORS.split()}
    | {name: getattr(torch.Tensor, name) for name in ("add_", "mul_")},
    "Scalar": {"lerp_": torch.Tensor.lerp_},
    "out": {name: getattr(torch, name) for name in ("mm", "bmm", "mul", "add")},
}


def emit(module: fx.GraphModule) -> Callable[..., Any]:
    """A function that takes the values of all placeholders, in order, and returns the graph's outputs."""
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def bind(found: re.Match[str]) -> str:
        name = "_".join(found.groups())
        names[name] = _fastest(*found.groups())
        return f"{name}("

    source = _OPERATION.sub(bind, code.src)
    exec(compile(source, f"<spmd step {id(module):x}>", "exec"), names)
    forward = names["forward"]
    return lambda inputs: forward(module, *inputs)


def _fastest(namespace: str, name: str, overload: str) -> Any:
    fast = _OVERLOADS.get(overload, {}).get(name) if namespace == "aten" else None
    return fast or raw_operation(getattr(getattr(getattr(torch.ops, namespace), name), overload))
