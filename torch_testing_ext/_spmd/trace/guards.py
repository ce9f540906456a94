"""Guards on everything that a trace read from Python: objects, attributes, globals, closures.

At each call the objects in all places that the step read are compared by identity. Only if one differs, they are
compared by what they describe: numbers and texts by value, containers and plain objects by content, all else by
identity.
"""

from __future__ import annotations

import gc
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from types import CodeType
from typing import Any

import torch

from torch_testing_ext._torch.spmd import is_fake

from ..spmd_errors import SPMDError
from .codes import Names, kind_of_file, reads_of
from .contents import content_of
from .observer import Observer
from .reach import Node, Reach, cells_of, contents_of_cache
from .substitution import Superseded
from .tensor_attributes import TensorAttribute
from .train_state import StepState

_VALUES = methodcaller("values")
_BASES = attrgetter("__mro__")
_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_TRANSIENT = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"}


class Labels:
    """Recognizes the tensors of a model, under whichever object they are reached."""

    def __init__(self, state: StepState) -> None:
        self.state = state

    def __call__(self, tensor: Any) -> Any:
        """A label of the model's tensor, or None for any other tensor."""
        if type(tensor) is Superseded:
            tensor = tensor.successor
        index = self.state.index_of(tensor)
        if index is not None:
            return "param", index
        return next((("buffer", i) for i, ref in enumerate(self.state.buffers) if ref.value is tensor), None)


@dataclass
class ReadRoots:
    """An object at which a step starts to read Python objects.

    roots: the step itself, opaque arguments, modules and optimizers, by the text that names them in errors.
    codes: the code of users and libraries that ran, with its globals.
    """

    roots: dict[str, Any]
    names: Names
    bound: dict[int, Any]
    codes: list[tuple[CodeType, dict[str, Any]]]
    functions: list[types.FunctionType]


class ReadGuards:
    """The places that a step read during its trace, and what they held."""

    def __init__(
        self,
        roots: ReadRoots,
        labels: Labels,
        used: dict[int, torch.Tensor],
        values: list[Any],
        settings: list[Callable[[], Any]],
    ) -> None:
        self.roots, self.labels = roots, labels
        self.settings = [(get, get()) for get in settings]  # of torch
        self.reach = self._walk()
        self.tokens = self.reach.tokens
        self.tensors = [tensor for i, tensor in used.items() if i in self.reach.tensors]
        self.tensor_kinds = [*map(_kind, self.tensors)]
        self.values = values  # tensors whose values the trace read, each with a copy of them
        self.caches = [(function, contents_of_cache(function)) for function in self.reach.trusted_caches]
        self.expired = False  # a cache that has changed may come to look the same again, with other values
        self._list_places()

    def _walk(self) -> Reach:
        roots = self.roots
        reach = Reach(roots.names, self.labels, roots.bound)
        for path, root in roots.roots.items():
            reach.walk(root, path)
        for code, module_globals in roots.codes:
            reads = reads_of(code)
            reach.walk_globals(module_globals, reads.globals, reads.attributes)
        codes = {id(code) for code, _ in roots.codes}
        for function in roots.functions:
            reach.walk(function, function.__qualname__)
        done = 0
        while done < len(reach.functions):
            function = reach.functions[done]
            done += 1
            if id(function.__code__) in codes:
                for name, cell in cells_of(function):
                    reach.walk(cell, name)
        return reach

    # -- the fast comparison

    def _list_places(self) -> None:
        nodes = [node for node in self.reach.nodes.values() if type(node.owner) not in (tuple, frozenset)]
        contents = [node.owner for node in nodes if node.names is None and type(node.owner) is not types.CellType]
        self.sized: list[Any] = contents
        self.dicts = [owner for owner in contents if isinstance(owner, (dict, types.MappingProxyType)) and owner]
        self.sequences = [
            owner for owner in contents if not isinstance(owner, (dict, types.MappingProxyType)) and owner
        ]
        self.cells = [node.owner for node in nodes if type(node.owner) is types.CellType and node.values]
        named = [node for node in nodes if node.names and type(node.owner) is not types.FunctionType]
        self.attributes = [(itemgetter(*_at_least_two(node.names)), _attributes_of(node)) for node in named]
        # An attribute that an object does not have yet may come to hide that of its class.
        instances = [node.owner for node in nodes if node.names is not None and _is_object(node)]
        self.typed = [owner for owner in instances if hasattr(owner, "__dict__")]
        self.sized += [owner.__dict__ for owner in self.typed]
        self.classes = [node.owner for node in nodes if isinstance(node.owner, type)]
        self.functions = [node.owner for node in nodes if type(node.owner) is types.FunctionType]
        self.slotted = [
            (attrgetter(name), node.owner)
            for node in nodes
            if node.names is not None and not isinstance(node.owner, (type, dict, types.FunctionType))
            for name in self.reach.slot_names(node.owner)
        ]
        written = [function for function in self.functions if function.__dict__]
        self.attributes += [(itemgetter(*_at_least_two((*f.__dict__,))), f.__dict__) for f in written]
        self.sized += [function.__dict__ for function in self.functions]
        self.arrays = [(array, content) for array, _, content in self.reach.arrays]
        self.probes = [(probe, owner, probe(owner)) for probe, owner in self.reach.probes]
        self.empty = [owner for owner in self.sized if not owner]
        self.sized = [owner for owner in self.sized if owner]
        self.objects, self.lengths = [*self._objects()], [*map(len, self.sized)]

    def _objects(self) -> Iterator[Any]:
        found = [get(attributes) for get, attributes in self.attributes]
        found.append(map(type, self.typed))
        found += self.sequences
        found += self.dicts
        found += map(_VALUES, self.dicts)
        found += map(_FUNCTION, self.functions)
        found.append(map(_BASES, self.classes))
        if self.cells:
            found.append([cell.cell_contents for cell in self.cells])
        if self.slotted:
            found.append([get(owner) for get, owner in self.slotted])
        return chain.from_iterable(found)

    def hold(self) -> bool:
        """Whether everything that was read is still the same."""
        if self.caches and any(contents_of_cache(function) != before for function, before in self.caches):
            self.expired = True
        if self.expired or [*map(_kind, self.tensors)] != self.tensor_kinds or not self._same_outside():
            return False
        try:
            if (
                not any(self.empty)
                and [*map(len, self.sized)] == self.lengths
                and all(map(is_, self._objects(), self.objects))
                and all(content_of(array) == content for array, content in self.arrays)
                and all(_same(probe(owner), value) for probe, owner, value in self.probes)
            ):
                return True
        except (KeyError, ValueError, AttributeError):  # something was deleted
            pass
        return self._hold_by_content()

    def _same_outside(self) -> bool:
        """Whether what no walk compares is the same: values of tensors, settings of torch, the thread."""
        return (
            all(tensor.shape == values.shape and torch.equal(tensor, values) for tensor, values in self.values)
            and all(get() == value for get, value in self.settings)
            and self.reach.thread in (None, threading.get_ident())
        )

    def _hold_by_content(self) -> bool:
        try:
            reach = self._walk()
        except SPMDError:
            return False
        if reach.tokens != self.tokens:
            return False
        self.reach = reach
        self._list_places()
        return True


def _same(found: Any, before: Any) -> bool:
    return found is before or (type(found) is type(before) and isinstance(found, (int, float, str)) and found == before)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad


def _at_least_two(names: tuple[str, ...] | None) -> tuple[str, ...]:
    """`names`, so many that an itemgetter of them returns a tuple."""
    assert names
    return names if len(names) > 1 else (*names, *names)


def _is_object(node: Node) -> bool:
    return not isinstance(node.owner, (dict, type, types.FunctionType))


def _attributes_of(node: Node) -> Any:
    return node.owner if type(node.owner) is dict else node.owner.__dict__


def functions_of(codes: list[CodeType]) -> list[types.FunctionType]:
    """All living functions that run one of `codes`, which close over variables."""
    wanted = {id(code) for code in codes if code.co_freevars and code.co_name not in _TRANSIENT}
    if not wanted:
        return []
    gc.unfreeze()  # frozen objects are not searched: the ranks of a test freeze what has been imported
    found = gc.get_referrers(*(code for code in codes if id(code) in wanted))
    return [f for f in found if type(f) is types.FunctionType and id(f.__code__) in wanted]


def guard_reads(
    observer: Observer,
    roots: dict[str, Any],
    state: StepState,
    captured: dict[int, tuple[torch.Tensor, str | None]],
    values: dict[int, tuple[torch.Tensor, torch.Tensor]],
) -> ReadGuards:
    """The guards on everything that an observed trace read. Refuses tensors that later calls could not find again."""
    codes = sorted(observer.globals.values(), key=lambda item: kind_of_file(item[0].co_filename) == "library")
    functions = functions_of([code for code, _ in codes])
    bound = observer.reach.bound
    read = ReadRoots(
        {**roots, **observer.more_roots}, observer.names, bound, codes, [f for f in functions if not _of_trace(f)]
    )
    labels = Labels(state)
    for root in observer.more_roots.values():
        if isinstance(root, TensorAttribute):
            root.labels = labels
    used = {i: tensor for i, (tensor, _) in captured.items()}
    guards = ReadGuards(read, labels, used, [*values.values()], observer.settings)
    observer.refuse(guards.reach)
    for i, (tensor, where) in captured.items():
        if i not in guards.reach.tensors:
            raise SPMDError(
                f"The step uses a tensor of shape {tuple(tensor.shape)} from outside that it does not find through an "
                "attribute, a closure or a global variable, so that a later call could not tell whether it is still "
                "the same.",
                remedy="Pass it to the step as an argument.",
                where=where,
            )
    for iterator, path in guards.reach.iterators:
        raise SPMDError(
            f"The step reads an iterator ({path}, {type(iterator).__name__}), which the traced program would not "
            "advance.",
            remedy="Advance it outside of the step, and pass the item as an argument.",
        )
    return guards


def _of_trace(function: types.FunctionType) -> bool:
    """Whether a function was created during the trace: it closes over fake tensors."""
    contents = (cell.cell_contents for _, cell in cells_of(function) if cell != types.CellType())
    return any(map(is_fake, contents))
