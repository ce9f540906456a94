"""Code generation: turns a graph into a Python function that calls operations with minimal overhead.

`GraphModule.forward` looks up every operation through four attributes and calls it through a wrapper. In a small step
this takes a third of the time. Here each operation is bound once, in its fastest form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_testing_ext._torch.spmd import raw_operation

aten = torch.ops.aten

# The generated Python bindings parse plain arguments faster than the dispatcher's generic call. This lists only
# operations whose binding takes exactly the schema's arguments in the schema's order.
_FAST: dict[Any, Callable[..., Any]] = {
    aten.t.default: torch.t,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.relu.default: torch.relu,
    aten.sigmoid.default: torch.sigmoid,
    aten.tanh.default: torch.tanh,
    aten.sqrt.default: torch.sqrt,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.cat.default: torch.cat,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.addcmul_.default: torch.Tensor.addcmul_,
    aten.addcdiv_.default: torch.Tensor.addcdiv_,
    aten.lerp_.Scalar: torch.Tensor.lerp_,
    aten.view.default: torch.Tensor.view,
    aten.expand.default: torch.Tensor.expand,
    aten.mm.out: torch.mm,
    aten.bmm.out: torch.bmm,
    aten.mul.out: torch.mul,
    aten.add.out: torch.add,
}


def emit(graph: fx.Graph, module: torch.nn.Module) -> Callable[[Sequence[Any]], Any]:
    """A function that takes the values of the used placeholders, in order, and returns the graph's outputs."""
    return _Emitter(graph, module).function()


class _Emitter:
    def __init__(self, graph: fx.Graph, module: torch.nn.Module) -> None:
        self.graph, self.module = graph, module
        self.bound: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.last_uses = _last_uses(graph)

    def function(self) -> Callable[[Sequence[Any]], Any]:
        inputs = [node.name for node in self.graph.nodes if node.op == "placeholder" and node.users]
        lines = [f"    {''.join(name + ', ' for name in inputs)}= inputs"] if inputs else []
        for node in self.graph.nodes:
            lines += [f"    {line}" for line in self._lines(node)]
        source = "\n".join(["def step(inputs):", *lines])
        namespace = dict(self.bound)
        exec(compile(source, f"<spmd step {id(self.graph):x}>", "exec"), namespace)
        step: Callable[[Sequence[Any]], Any] = namespace["step"]
        return step

    def _lines(self, node: fx.Node) -> list[str]:
        if node.op == "placeholder":
            return []
        if node.op == "output":
            return [f"return {self._text(node.args[0])}"]
        lines = [f"{node.name} = {self._call(node)}"]
        if unneeded := self.last_uses.get(node):
            lines.append(f"{' = '.join(other.name for other in unneeded)} = None")
        return lines

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            return f"{self._bind(self.module.get_submodule(owner))}.{name}"
        args = [self._text(arg) for arg in node.args]
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join(args[1:] + self._keywords(node))})"
        if node.op == "call_module":
            return (
                f"{self._bind(self.module.get_submodule(str(node.target)))}({', '.join(args + self._keywords(node))})"
            )
        if getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[1], int):
            return f"{args[0]}[{node.args[1]}]"
        return f"{self._bind(_fastest(node.target))}({', '.join(args + self._keywords(node))})"

    def _keywords(self, node: fx.Node) -> list[str]:
        return [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]

    def _text(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return arg.name
        if isinstance(arg, (list, tuple)) and type(arg) is not torch.Size:
            inside = ", ".join(map(self._text, arg))
            return f"[{inside}]" if isinstance(arg, list) else f"({inside}{',' * (len(arg) == 1)})"
        if isinstance(arg, dict):
            return "{" + ", ".join(f"{key!r}: {self._text(value)}" for key, value in arg.items()) + "}"
        if isinstance(arg, slice):
            return f"slice({self._text(arg.start)}, {self._text(arg.stop)}, {self._text(arg.step)})"
        if arg is None or isinstance(arg, (bool, int, str)) or (isinstance(arg, float) and math.isfinite(arg)):
            return repr(arg)
        return self._bind(arg)

    def _bind(self, value: Any) -> str:
        name = self.names.get(id(value))
        if name is None:
            name = self.names[id(value)] = f"_bound_{len(self.bound)}"
            self.bound[name] = value
        return name


def _fastest(target: Any) -> Any:
    if not isinstance(target, torch._ops.OpOverload):
        return target
    return _FAST.get(target) or raw_operation(target)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that no later node needs, without inputs, which the caller keeps alive."""
    unneeded: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for arg in (node, *node.all_input_nodes):
            if arg not in seen:
                seen.add(arg)
                if arg.op not in ("placeholder", "output") and node.op != "output":
                    unneeded.setdefault(node, []).append(arg)
    return unneeded
