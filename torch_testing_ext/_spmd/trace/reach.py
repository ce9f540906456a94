"""The objects that a step can reach: a walk from its function, its arguments and the globals that its code names.

The walk goes into whatever Python code can read without calling anything: containers, attributes, closures, defaults.
Of an object's attributes it follows only those whose names occur in code that ran.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import ctypes
import decimal
import enum
import functools
import io
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..spmd_errors import SPMDError
from .codes import Names, is_standard, kind_of_file, standard_module
from .contents import content_of, generator_state, is_array
from .tensor_attributes import TensorAttribute, absent
from .types_seen import type_seen

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device, torch.layout)
_ITEMS = (list, tuple, collections.deque, set, frozenset)
_OF_CONTENT = (
    collections.UserDict,
    collections.UserList,
    collections.UserString,
    collections.ChainMap,
    threading.Event,
    SynchronizedBase,
)
_BUILTIN_OBJECTS = (types.SimpleNamespace, argparse.Namespace, *_OF_CONTENT)
_BYTES = (bytearray, memoryview, array.array, ctypes.Array, ctypes.Structure, ctypes.Union)
_FUNCTION_ATTRIBUTES = ("__code__", "__defaults__", "__kwdefaults__")
_LIMIT = 200_000
_MAX_SHARED = 100  # of a container in a module of Python's library, such as sys.argv
_MAX_ARRAY_BYTES = 1 << 20
_HEAP_TYPE = 1 << 9
# Parts of Python's library whose objects belong to the interpreter, or keep caches of their own.
_OF_PYTHON = {
    *("abc", "ast", "codecs", "dis", "encodings", "enum", "functools", "importlib", "inspect", "logging"),
    *("pathlib", "re", "tokenize", "traceback", "types", "typing", "unittest", "warnings", "weakref", "zipimport"),
}
# What model and optimizer hold in these attributes is compared by the binding (run/binding.py).
_BOUND_ATTRIBUTES = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}
_BOUND_OPTIMIZER_ATTRIBUTES = {"param_groups", "state", "_opt_called"}


@dataclass
class Node:
    """One object of the walk, with what was read from it: attributes under their names, or items under None."""

    owner: Any
    path: str
    names: tuple[str, ...] | None
    values: list[Any]
    of_library: bool
    present: frozenset[str] | None = None  # all attributes, read or not; None if new ones do not matter


@dataclass
class Reach:
    """A walk, with everything that it found.

    label_of: a label for tensors that are known to be the model's, else None.
    bound: modules and optimizers whose own registries are compared elsewhere, by id.
    """

    names: Names
    label_of: Callable[[Any], Any]
    bound: dict[int, Any]
    nodes: dict[int, Node] = field(default_factory=dict)
    tensors: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)
    arrays: list[tuple[Any, str, bytes]] = field(default_factory=list)  # arrays and buffers, with their contents
    functions: list[types.FunctionType] = field(default_factory=list)
    generators: list[tuple[Any, str, Any]] = field(default_factory=list)
    iterators: list[tuple[Any, str]] = field(default_factory=list)
    probes: list[tuple[Callable[[Any], Any], Any]] = field(default_factory=list)  # how to read what is not an attribute
    opaque: dict[int, str] = field(default_factory=dict)  # the paths of objects that cannot be seen into, by id
    thread: int | None = None  # the one that ran the step, if it read what is the thread's own
    trusted_caches: list[Any] = field(default_factory=list)  # functions of the user, whose results may be old ones
    caches: list[tuple[Any, int]] = field(default_factory=list)  # functions with a cache, and its size
    tokens: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # objects that tokens identify by their ids
    has_decimals: bool = False  # whose arithmetic has a context
    grown: list[Node] = field(default_factory=list)  # new nodes, and nodes with new names

    def walk(self, value: Any, path: str, of_library: bool = False) -> None:
        """Go through everything that can be read from `value`."""
        stack = [(value, path)]
        while stack:
            value, path = stack.pop()
            children = self._visit(value, path, of_library)
            if children:
                stack.extend(reversed(children))
            if len(self.nodes) > _LIMIT:
                raise SPMDError(
                    f"The step can reach more than {_LIMIT} objects, which would have to be compared at each call "
                    f"(for instance {path}).",
                    remedy="Pass what the step needs as arguments, or keep it in tensors.",
                )

    def walk_globals(self, module_globals: dict[str, Any], names: Iterable[str], attributes: Iterable[str]) -> None:
        """Go through the globals `names` of a module, as code does that also names `attributes`."""
        of_library = not _is_users(module_globals)
        for name in names:
            if module_globals.get(name, type_seen) is type_seen:
                self.tokens.append(("builtin", name))
                continue
            value = module_globals[name]
            node = self._node_of_names(module_globals, str(module_globals.get("__name__")), of_library)
            self._add_name(node, name, value)
            self._walk_global(value, name, attributes, of_library)

    def _walk_global(self, value: Any, path: str, attributes: Iterable[str], of_library: bool) -> None:
        if not isinstance(value, types.ModuleType):
            self.walk(value, path, of_library)
            return
        node = self._node_of_names(value.__dict__, path, of_library)
        own = kind_of_file(getattr(value, "__file__", None) or "<builtin>") in ("user", "library")
        for name in attributes:
            if name in value.__dict__ and name not in (node.names or ()):
                item = value.__dict__[name]
                self._add_name(node, name, item)
                if isinstance(item, types.ModuleType) or own:
                    self._walk_global(item, f"{path}.{name}", attributes, of_library)
                elif (
                    type(item) in (list, dict, set)
                    and len(item) < _MAX_SHARED
                    and not value.__name__.startswith("torch")
                ):
                    self.walk(item, f"{path}.{name}", of_library=True)
                else:
                    self._note_context(item, path)
                    self.kept.append(item)
                    self.tokens.append(("object", id(item)))

    def _node_of_names(self, attributes: dict[str, Any], path: str, of_library: bool) -> Node:
        return self.nodes.setdefault(id(attributes), Node(attributes, path, (), [], of_library))

    def _add_name(self, node: Node, name: str, value: Any) -> None:
        if node.names is not None and name not in node.names:
            node.names = (*node.names, name)
            node.values.append(value)
            self.grown.append(node)

    def slot_names(self, owner: Any) -> list[str]:
        """The slots of an object that may be read."""
        return self.names.select(_slots_of(type(owner), owner))

    def refresh(self) -> None:
        """Read the attributes whose names have become known since their object was visited."""
        for node in list(self.nodes.values()):
            if node.names is None or _reader_of(node.owner, type(node.owner)) not in (_read_object, _read_class):
                continue
            attributes = node.owner.__dict__ if hasattr(node.owner, "__dict__") else {}
            for name in self.names.select(attributes):
                if name not in node.names and not self._is_bound(node.owner, name):
                    value = node.owner.__dict__[name]
                    self._add_name(node, name, value)
                    self.walk(value, f"{node.path}.{name}", node.of_library)

    def _is_bound(self, owner: Any, name: str) -> bool:
        if id(owner) not in self.bound:
            return False
        return name in (_BOUND_ATTRIBUTES if isinstance(owner, nn.Module) else _BOUND_OPTIMIZER_ATTRIBUTES)

    def _visit(self, value: Any, path: str, of_library: bool) -> list[tuple[Any, str]]:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum):
            self.tokens.append((kind, repr(value) if kind in (float, complex) else value))
            return []
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        known = self.nodes.get(id(value))
        if known is not None:
            self.tokens.append(("again", id(value)))
            return []
        reader = _reader_of(value, kind)
        if reader is None:
            self._opaque(value, path)
            return []
        names, values, children = reader(self, value, path)
        present = frozenset(getattr(value, "__dict__", ()))
        self.nodes[id(value)] = Node(value, path, names, values, of_library, present)
        self.grown.append(self.nodes[id(value)])
        self.tokens.append((kind, names, len(values)))
        return children

    def _tensor(self, value: torch.Tensor, path: str) -> list[tuple[Any, str]]:
        label = self.label_of(value)
        if label is not None:
            self.tokens.append(label)
            return []
        self.tensors.setdefault(id(value), (value, path))
        self.tokens.append(("tensor", id(value)))
        return [(value.__dict__, path)] if type(value) is torch.Tensor else []  # what users have set on it

    def _note_context(self, value: Any, path: str) -> None:
        """The arithmetic of decimal numbers depends on the thread's context, which no code needs to name."""
        if (value is decimal.Decimal or isinstance(value, decimal.Decimal)) and not self.has_decimals:
            self.has_decimals = True
            self.probes.append((_probe_context, decimal.getcontext))
            self.tokens.append((path, _probe_context(decimal.getcontext)))

    def _opaque(self, value: Any, path: str) -> None:
        self._note_context(value, path)
        self.kept.append(value)
        if is_array(value):
            self._array(value, path)
            return
        if isinstance(value, _BYTES):
            self.arrays.append((value, path, content_of(value)))
            self.tokens.append((type(value), self.arrays[-1][2]))
            return
        self.opaque[id(value)] = path
        self.tokens.append(("object", id(value)))
        state = generator_state(value)
        if state is not None:
            self.generators.append((value, path, state))
        elif isinstance(value, Iterator) and (not isinstance(value, io.IOBase) or _is_read(value)):
            self.iterators.append((value, path))

    def _array(self, value: Any, path: str) -> None:
        if value.nbytes > _MAX_ARRAY_BYTES or value.dtype.hasobject:
            raise SPMDError(
                f"The step reads a numpy array of {value.nbytes} bytes ({path}), whose values may change unseen.",
                remedy="Pass it to the step as a tensor.",
            )
        self.arrays.append((value, path, content_of(value)))
        self.tokens.append(("array", value.dtype.str, value.shape, self.arrays[-1][2]))


_Read = tuple["tuple[str, ...] | None", "list[Any]", "list[tuple[Any, str]]"]
_Reader = Callable[[Reach, Any, str], _Read]


def _reader_of(value: Any, kind: type) -> _Reader | None:
    """The way to read an object of this type, or None if it is opaque: compared by its identity, or as bytes."""
    if isinstance(value, _BYTES):
        return None
    if isinstance(value, _ITEMS):
        return _read_items if not _has_own_attributes(value, kind) else _read_items_and_attributes
    if isinstance(value, (dict, types.MappingProxyType)):
        return _read_dict if not _has_own_attributes(value, kind) else _read_dict_and_attributes
    reader = _READERS.get(kind)
    if reader is not None:
        return reader
    for base, read in _READERS_OF_KINDS.items():
        if isinstance(value, base):
            return read
    if isinstance(value, type):
        return _read_class if _is_own(value) else None
    if isinstance(value, types.ModuleType):
        return None  # attributes of modules are found by the code that names them
    if _is_own(kind) or isinstance(value, (nn.Module, Optimizer, functools.partial, *_BUILTIN_OBJECTS)):
        return _read_object
    if (kind.__module__.startswith("torch.") or _is_of_content(value)) and hasattr(value, "__dict__"):
        return _read_object
    return None


def _is_of_content(value: Any) -> bool:
    """Whether all attributes of an object count: it is of a class in Python's library, whose code nobody observes."""
    kind: type = type(value)
    if isinstance(value, _OF_CONTENT):
        return True
    return _is_standard(kind) and not isinstance(value, (Iterator, io.IOBase)) and not generator_state(value)


@functools.lru_cache(maxsize=4096)
def _is_standard(kind: Any) -> bool:
    """Whether a class is written in Python, in a module of its library that steps compute with."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if not kind.__flags__ & _HEAP_TYPE or file is None or issubclass(kind, type):
        return False
    return file.endswith((".py", ".pyc")) and is_standard(file) and kind.__module__.split(".")[0] not in _OF_PYTHON


def _has_own_attributes(value: Any, kind: type) -> bool:
    return _is_own(kind) and bool(getattr(value, "__dict__", None))


@functools.lru_cache(maxsize=4096)
def _is_own(kind: type) -> bool:
    """Whether a class is written in Python, and neither part of Python's library nor of torch."""
    if not kind.__flags__ & _HEAP_TYPE:  # a type of an extension
        return False
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        return module is None or kind.__module__ == "__main__"
    return file.endswith((".py", ".pyc")) and kind_of_file(file) in ("user", "library")


def _read_items(reach: Reach, value: Any, path: str) -> _Read:
    values = list(value)
    return None, values, [(item, f"{path}[{i}]") for i, item in enumerate(values)]


def _read_dict(reach: Reach, value: Any, path: str) -> _Read:
    keys, values = list(value), list(value.values())
    named = [
        (item, f"{path}[{key!r}]" if type(key) in _PLAIN else path) for key, item in zip(keys, values, strict=True)
    ]
    return None, [*keys, *values], [*((key, path) for key in keys), *named]


def _read_items_and_attributes(reach: Reach, value: Any, path: str) -> _Read:
    _, values, children = _read_items(reach, value, path)
    return None, values, [*children, (value.__dict__, path), (type(value), path)]


def _read_dict_and_attributes(reach: Reach, value: Any, path: str) -> _Read:
    _, values, children = _read_dict(reach, value, path)
    return None, values, [*children, (value.__dict__, path), (type(value), path)]


def _read_object(reach: Reach, value: Any, path: str) -> _Read:
    if isinstance(value, functools.partial):
        return (), [], [(value.func, path), (value.args, path), (value.keywords, path)]
    attributes = getattr(value, "__dict__", {})
    names = [*attributes] if _is_of_content(value) else reach.names.select(attributes)
    names = [name for name in names if not reach._is_bound(value, name)]
    values = [attributes[name] for name in names]
    children = [(attributes[name], f"{path}.{name}") for name in names]
    children += [(getattr(value, name), f"{path}.{name}") for name in reach.slot_names(value)]
    return tuple(names), values, [*children, (type(value), path)]


def _slots_of(kind: type, value: Any) -> list[str]:
    if not any("__slots__" in base.__dict__ for base in kind.__mro__):
        return []
    slots: list[str] = []
    for base in kind.__mro__:
        found = base.__dict__.get("__slots__", ())
        slots += [found] if isinstance(found, str) else [*found]
    return [name for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)]


def _read_class(reach: Reach, value: Any, path: str) -> _Read:
    names = reach.names.select(value.__dict__)
    values = [value.__dict__[name] for name in names]
    children = [(item, f"{value.__qualname__}.{name}") for name, item in zip(names, values, strict=True)]
    classes = [base for base in (*value.__mro__[1:], type(value)) if _is_own(base)]
    return tuple(names), values, [*children, *((each, path) for each in classes)]


def _read_function(reach: Reach, value: Any, path: str) -> _Read:
    reach.functions.append(value)
    inside = [(value.__code__, path), (value.__defaults__, path), (value.__kwdefaults__, path)]
    names = reach.names.select(value.__dict__)
    if "__wrapped__" in value.__dict__ and "__wrapped__" not in names:
        names.append("__wrapped__")
    if "registry" in value.__dict__ and standard_module(value.__code__.co_filename) == "functools":  # singledispatch
        inside.append((value.registry, path))
    inside += [(value.__dict__[name], f"{path}.{name}") for name in names]
    return _FUNCTION_ATTRIBUTES, [getattr(value, name) for name in _FUNCTION_ATTRIBUTES], inside


def _read_cell(reach: Reach, value: Any, path: str) -> _Read:
    try:
        content = value.cell_contents
    except ValueError:
        return None, [], []
    return None, [content], [(content, path)]


def _is_users(module_globals: dict[str, Any]) -> bool:
    return kind_of_file(module_globals.get("__file__") or "<string>") == "user"


def _read_logger(reach: Reach, value: Any, path: str) -> _Read:
    reach.probes += [(_probe_level, value), (_probe_disabled, value)]
    return (), [], [(_probe_level(value), path), (_probe_disabled(value), path)]


def _probe_level(logger: logging.Logger) -> int:
    return logger.getEffectiveLevel()


def _probe_disabled(logger: logging.Logger) -> int:
    return logger.disabled or logger.manager.disable


def _probe_context(get: Callable[[], Any]) -> str:
    return repr(get())


def _read_cached_function(reach: Reach, value: Any, path: str) -> _Read:
    reach.caches.append((value, value.cache_info().currsize))
    wrapped = getattr(value, "__wrapped__", None)
    if isinstance(wrapped, types.FunctionType) and kind_of_file(wrapped.__code__.co_filename) == "user":
        # What the step got from the cache, no trace has seen being computed.
        reach.trusted_caches.append(value)
    return (), [], [(wrapped, path)]


def _read_weak_container(reach: Reach, value: Any, path: str) -> _Read:
    return ("data",), [value.data], [(value.data, path)]


def _read_weak_reference(reach: Reach, value: Any, path: str) -> _Read:
    """Read what a weak reference refers to. One to a parameter would die when a DTensor replaces the parameter."""
    if isinstance(value(), torch.Tensor) and reach.label_of(value()) is not None:
        raise SPMDError(
            f"The step reads a weak reference to a parameter or buffer ({path}).",
            remedy="Keep a strong reference, or the name of the parameter.",
        )
    return _read_referent(reach, value, path)


def contents_of_cache(function: Any) -> tuple[int, int]:
    """The counts that change with a functools cache: its misses, and the number of its entries."""
    info = function.cache_info()
    return info.misses, info.currsize


def _read_of_thread(reach: Reach, value: Any, path: str) -> _Read:
    reach.thread = threading.get_ident()
    return _read_object(reach, value, path)


def _reading(*names: str) -> _Reader:
    """The reader of objects that never change, and hold others under these names."""
    return lambda reach, value, path: ((), [], [(getattr(value, name), path) for name in names])


def _probing(probe: Callable[[Any], Any]) -> _Reader:
    """The reader of objects that hold what `probe` returns."""

    def read(reach: Reach, value: Any, path: str) -> _Read:
        reach.probes.append((probe, value))
        content = probe(value)
        return (), [], [] if content is absent else [(content, path)]

    return read


_read_referent = _probing(lambda reference: reference())
_READERS_OF_KINDS: dict[type, _Reader] = {
    logging.Logger: _read_logger,
    weakref.WeakSet: _read_weak_container,
    weakref.WeakKeyDictionary: _read_weak_container,
    weakref.WeakValueDictionary: _read_weak_container,
    WeakIdKeyDictionary: _read_weak_container,
    weakref.ref: _read_weak_reference,
    ctypes._SimpleCData: _probing(lambda number: number.value),
    threading.local: _read_of_thread,
}
_READERS: dict[type, _Reader] = {
    contextvars.ContextVar: _probing(lambda variable: variable.get(absent)),
    TensorAttribute: _probing(TensorAttribute.value),
    types.FunctionType: _read_function,
    types.MethodType: _reading("__func__", "__self__"),
    types.CellType: _read_cell,
    property: _reading("fget", "fset", "fdel"),
    staticmethod: _reading("__func__"),
    classmethod: _reading("__func__"),
    functools.cached_property: _reading("func"),
    type(functools.lru_cache(lambda: None)): _read_cached_function,
}


def _is_read(file: io.IOBase) -> bool:
    """Whether a file is there to be read, and not to be written, as logs are."""
    return not file.closed and file.readable() and not file.writable()


def cells_of(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    """The closure cells of a function, by their names."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
