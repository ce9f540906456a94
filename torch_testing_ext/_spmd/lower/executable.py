"""Executables: turns a program into a callable, run by the interpreter or compiled by inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from torch_testing_ext._torch.spmd import inductor_compile, inductor_decompositions, python_dispatcher

from .cleaning import placeholders, remove_dead_code
from .emit import emit
from .lowering import LoweredProgram


def make_executable(program: LoweredProgram, compiled: bool) -> Callable[[list[Any]], Any]:
    """A function that takes the values of the inputs that the program uses, in order, and returns its outputs."""
    if not compiled:
        return emit(program.graph.graph, program.graph)
    return _compiled(program)


def _compiled(program: LoweredProgram) -> Callable[[list[Any]], Any]:
    """Compile by inductor, which needs a functional graph of tensors: learning rates become 0-d tensors."""
    graph = program.graph.graph
    nodes, sources = placeholders(graph), program.traced.sources
    used = [(node, source) for node, source in zip(nodes, sources, strict=True) if node.users]
    fakes = [node.meta["val"] for node, _ in used]
    numbers = [i for i, (_, source) in enumerate(used) if source.kind == "lr"]
    mode = fakes[0].fake_mode
    plain = emit(graph, program.graph)

    def with_rates_as_numbers(*inputs: torch.Tensor) -> Any:
        values: list[Any] = list(inputs)
        for i in numbers:
            values[i] = values[i].item() if _is_number(program, used[i][1]) else values[i]
        return plain(values)

    decompositions = inductor_decompositions()
    with mode, python_dispatcher(), torch.no_grad():
        functional = make_fx(
            functionalize(with_rates_as_numbers, remove="mutations_and_views"),
            decomposition_table=decompositions,
        )(*fakes)
    remove_dead_code(functional.graph)
    functional.recompile()
    run = inductor_compile(functional, fakes, mode)
    to_tensors = [i for i in numbers if _is_number(program, used[i][1])]
    rates: dict[int, tuple[Any, torch.Tensor]] = {}  # the last one of each input, with its tensor

    def call(inputs: list[Any]) -> Any:
        for i in to_tensors:
            rate = inputs[i]
            if i not in rates or rates[i][0] != rate:
                rates[i] = rate, torch.tensor(rate, dtype=torch.float64)
            inputs[i] = rates[i][1]
        return run(inputs)

    return call


def _is_number(program: LoweredProgram, source: Any) -> bool:
    return program.traced.is_number_lr.get((source.i, source.j), False)
