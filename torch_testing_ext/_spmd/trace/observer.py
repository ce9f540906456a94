"""An observer of the step's Python code: which code runs, what it reads, and whether it changes any of that.

A traced program runs no Python code. What the code read during the trace becomes a condition of the program
(`ReadGuards`); a step that changes a Python object would change it only once, and is refused.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import importlib
import operator
import os
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from torch_testing_ext._torch.spmd import disable_torch_function, show_class_of_fakes

from ..spmd_errors import SPMDError, user_line
from .codes import Names, kind_of_code, reads_of
from .contents import content_of, generator_state, put_content
from .reach import Node, Reach, cells_of
from .substitution import Superseded, successor_of_id
from .tensor_attributes import TensorAttribute, absent
from .types_seen import asks_for_class, put_in, show_classes, take_from
from .world import (
    asker_of_setting,
    hidden_read,
    holds_no_world,
    is_asked_by_step,
    may_be_setting,
    never_asks,
    outside_read,
    outside_read_in_python,
    reads_environment,
    setting_of,
)

_MUTABLE = (list, dict, set, collections.deque)
# torch's own code whose attribute names matter: modules, optimizers and schedulers.
_TORCH_PARTS = tuple(f"{torch.__path__[0]}/{part}/" for part in ("nn", "optim", "utils/data", "amp"))
_IMPORT = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
_missing = object()
_ID_AS_TEXT = re.compile(r"0[xX][0-9a-fA-F]{8,16}|(?<!\d)[1-9]\d{8,19}(?!\d)")


class Observer:
    """Watches one trace.

    to_fake, to_real: the fakes of the model's tensors by the id of the real one, and back.
    """

    def __init__(
        self, label_of: Callable[[Any], Any], bound: dict[int, Any], to_fake: dict[int, Any], to_real: dict[int, Any]
    ) -> None:
        self.names = Names()
        self.reach = Reach(self.names, label_of, bound)
        self.to_fake, self.to_real = to_fake, to_real
        self.codes: dict[int, CodeType] = {}
        self.globals: dict[tuple[int, int], tuple[CodeType, dict[str, Any]]] = {}
        self.named_globals: set[str] = set()  # in the user's own code
        self.error: SPMDError | None = None
        self.settings: list[Callable[[], Any]] = []  # functions that return those of torch
        self.more_roots: dict[str, Any] = {}  # found while the step ran
        # Codes and functions in C whose further calls tell nothing new, by id. Nearly all calls of a trace are theirs.
        self._dull: dict[int, Any] = {}
        self._dull_types: dict[type, bool] = {}  # whether this holds for all methods in C of a type
        self.swapped = 0  # how many functions' variables hold fakes
        self.cells: dict[int, tuple[types.CellType, str, Any]] = {}  # with what they held before the trace
        self.own_attributes: dict[int, tuple[Any, str, dict[str, Any]]] = {}  # of classes and functions
        self.undo: list[tuple[Any, str, Any, Any]] = []  # an owner, a name, what it held, and the fake in its place
        self._moved: list[str] = []
        self.changed: list[tuple[Node, list[str]]] = []
        self.changed_arrays: dict[int, str] = {}  # their paths, by id
        self._typed: list[dict[str, Any]] = []  # globals in which `type` is replaced
        self._previous: Any = None
        self._import: FrameType | None = None  # the import that runs at present

    # -- while the step runs

    @contextlib.contextmanager
    def watching(self, roots: dict[str, Any]) -> Iterator[None]:
        """Observe the code that runs in this context; `roots` are objects that the step gets from outside."""
        for path, root in roots.items():
            self._walk(root, path)
        shared = [(path, get, get()) for path, get in _shared_generators()]
        previous: Any = sys.getprofile()
        self._previous = previous if callable(previous) else None
        collects = gc.isenabled()
        gc.disable()  # callbacks and finalizers of a collection are no part of the step
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(self._previous)
            show_class_of_fakes(None)
            if collects:
                gc.enable()
            if previous is not None and self._previous is None:  # a profiler written in C
                previous.enable()
        self._moved += [path for path, get, before in shared if not _same_state(before, get())]

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._import is not None:  # what an import runs is no part of the step
            if event == "return" and frame is self._import:
                self._import = None
        elif event == "call":
            if frame.f_code is _IMPORT:
                self._import = frame
            elif id(frame.f_code) not in self._dull:
                self._on_call(frame)
        elif event == "c_call":
            self._on_c_call(frame, arg)
        if self._previous is not None:
            self._previous(frame, event, arg)

    def _on_call(self, frame: FrameType) -> None:
        code = frame.f_code
        if what := outside_read_in_python(frame):
            self._refuse_outside_read(what, frame.f_back)
        elif reads_environment(code) and is_asked_by_step(frame):
            self.more_roots["os.environ"] = os.environ._data  # type: ignore[attr-defined]
            self._walk(self.more_roots["os.environ"], "os.environ")
        self.codes[id(code)] = code
        kind = kind_of_code(code, frame.f_globals)
        if asks_for_class(code, kind):
            show_classes()
        if kind == "system":
            if not code.co_argcount and code.co_filename.startswith(_SYSTEM):
                self._note_setting(frame.f_globals.get(code.co_name), frame.f_globals.get("__name__"), frame.f_back)
            if code.co_filename.startswith(_TORCH_PARTS):
                self.names.add(code, of_system=True)
            if code.co_filename != "<string>" and never_asks(code):
                self._dull[id(code)] = code
            return
        try:
            with disable_torch_function():
                self._on_user_call(frame, code)
                if kind == "user":
                    self.named_globals.update(reads_of(code).globals)
        except SPMDError as error:
            self.error = self.error or error

    def _on_c_call(self, frame: FrameType, function: Any) -> None:
        if id(function) in self._dull:
            return
        module = getattr(function, "__module__", None)
        if module is None and self._is_dull(type(getattr(function, "__self__", None))):
            return
        what = outside_read(function) or hidden_read(function, self.reach.opaque)
        if what is not None:
            self._refuse_outside_read(what, frame)
        elif may_be_setting(function, module):
            self._note_setting(function, module, frame)
        elif module is not None:  # not a method of an object, which ends with the call
            self._dull[id(function)] = function

    def _is_dull(self, kind: type) -> bool:
        if kind not in self._dull_types:
            self._dull_types[kind] = holds_no_world(kind)
        return self._dull_types[kind]

    def _note_setting(self, function: Any, module: str | None, asker: FrameType | None) -> None:
        asker = asker_of_setting(asker)
        if asker is not None and kind_of_code(asker.f_code, asker.f_globals) != "system":
            setting = setting_of(function, module)
            if setting is not None and setting not in self.settings:
                self.settings.append(setting)

    def _refuse_outside_read(self, what: str, frame: FrameType | None) -> None:
        if self.error is None and is_asked_by_step(frame):
            self.error = SPMDError(
                f"The step reads {what}. The traced program would not ask again, and keep the first answer.",
                remedy="Read it outside of the step, and pass the value as an argument.",
                where=user_line(frame),
            )

    def _on_user_call(self, frame: FrameType, code: CodeType) -> None:
        grown = self.names.add(code, of_system=False)
        key = id(code), id(frame.f_globals)
        if key not in self.globals:
            self.globals[key] = code, frame.f_globals
            reads = reads_of(code)
            self.reach.walk_globals(frame.f_globals, reads.globals, reads.attributes)
            if "type" in reads.globals and put_in(frame.f_globals):
                self._typed.append(frame.f_globals)
        names = (*code.co_freevars, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        if names:
            values = frame.f_locals
            for name in names:
                if name in values:
                    self.reach.walk(values[name], name)
        if grown:
            self.reach.refresh()
        self._swap_parameters()

    def read_attribute(self, asked: TensorAttribute) -> Any:
        """Note that the step asks for an attribute of a parameter or buffer, and return what it sees."""
        path = f"{asked.kind} {asked.index}.{asked.name}"
        if path not in self.more_roots:
            self.more_roots[path] = asked
            self._walk(asked, path)
        value = asked.value()
        return value if value is absent else self._faked(value)

    def _walk(self, value: Any, path: str) -> None:
        with disable_torch_function():
            self.reach.walk(value, path)
            self._swap_parameters()

    def _swap_parameters(self) -> None:
        """Put fakes in place of parameters wherever Python code finds them, so that comparing identities works."""
        grown, self.reach.grown = self.reach.grown, []
        for node in grown:
            if isinstance(node.owner, (type, types.FunctionType)) and not node.of_library:
                kept = node.owner, node.path, dict(node.owner.__dict__)
                self.own_attributes.setdefault(id(node.owner), kept)
            if node.names is None and type(node.owner) in _MUTABLE:
                if any(self._faked(item) is not item for item in node.values):
                    _set_content(node.owner, [self._faked(item) for item in node.values])
            elif type(node.owner) is types.FunctionType:
                self._swap(node.owner, "__defaults__")
            elif node.names is not None and not isinstance(node.owner, types.ModuleType):
                self._swap_attributes(node)
        for function in self.reach.functions[self.swapped :]:
            for name, cell in cells_of(function):
                if cell != types.CellType() and id(cell) not in self.cells:
                    self.cells[id(cell)] = cell, name, cell.cell_contents
                    self._swap(cell, "cell_contents")
        self.swapped = len(self.reach.functions)

    def _swap_attributes(self, node: Node) -> None:
        owner = node.owner
        attributes = owner if type(owner) is dict else getattr(owner, "__dict__", {})
        for name in node.names or ():
            if name in attributes:
                # A module would register a parameter that is set as its attribute.
                self._swap(attributes if type(attributes) is dict else owner, name)
        if not isinstance(owner, (type, dict)):
            for name in self.reach.slot_names(owner):
                self._swap(owner, name)

    def _swap(self, owner: Any, name: str) -> None:
        """Put a fake in place of what an attribute, or an item of a dict, holds, if it has one, during the run."""
        value = owner[name] if type(owner) is dict else getattr(owner, name)
        faked = self._faked(value)
        if faked is not value:
            self._put(owner, name, faked)
            self.undo.append((owner, name, value, faked))

    @staticmethod
    def _put(owner: Any, name: str, value: Any) -> None:
        if type(owner) is dict:
            owner[name] = value
        elif isinstance(owner, type):
            setattr(owner, name, value)
        else:
            object.__setattr__(owner, name, value)

    def _undo_swaps(self) -> None:
        for owner, name, value, faked in self.undo:
            with contextlib.suppress(AttributeError, ValueError):  # the step may have deleted it
                if (owner.get(name) if type(owner) is dict else getattr(owner, name)) is faked:
                    self._put(owner, name, value)

    def _restore_cells(self) -> None:
        """Undo changes to variables that functions share (`nonlocal`)."""
        for cell, name, before in self.cells.values():
            now = cell.cell_contents if cell != types.CellType() else _missing
            if now is not before:
                cell.cell_contents = before
                if not self._same(before, now):
                    self.changed.append((Node(cell, name, None, [before], False), [name]))

    def _restore_attributes(self) -> None:
        """Undo changes to the attributes of classes and functions."""
        for owner, path, before in self.own_attributes.values():
            now = dict(owner.__dict__)
            for name in now | before:
                if name.startswith("__") or now.get(name, _missing) is before.get(name, _missing):
                    continue
                if name in before:
                    setattr(owner, name, before[name])
                else:
                    delattr(owner, name)
                if not self._same(before.get(name, _missing), now.get(name, _missing)):
                    self.changed.append((Node(owner, path, None, [], False), [f"{path}.{name}"]))

    def _faked(self, value: Any) -> Any:
        """`value` with fakes in place of parameters, also inside of tuples and frozen sets."""
        if isinstance(value, (tuple, frozenset)):
            items = [self._faked(item) for item in value]
            if all(map(operator.is_, items, value)):
                return value
            return tuple.__new__(type(value), items) if isinstance(value, tuple) else frozenset(items)
        return self._fake_of(value)

    def _fake_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            current = value.successor if type(value) is Superseded else value
            return self.to_fake.get(id(current), value)
        if type(value) is int:  # perhaps the id of a parameter
            return self._faked_id(value)
        if type(value) is str and _ID_AS_TEXT.search(value):
            return _ID_AS_TEXT.sub(self._faked_text, value)
        return value

    def _faked_id(self, number: int) -> int:
        successor = successor_of_id(number)
        fake = self.to_fake.get(number if successor is None else id(successor))
        return number if fake is None else id(fake)

    def _faked_text(self, found: re.Match[str]) -> str:
        text = found.group()
        if text.startswith(("0x", "0X")):
            number = int(text, 16)
            return text if (faked := self._faked_id(number)) == number else hex(faked)
        return str(self._faked_id(int(text)))

    # -- afterwards

    def restore(self) -> None:
        """Undo the step's changes to Python objects, and remember where they were. Call it once, after the run."""
        for module_globals in self._typed:
            take_from(module_globals)
        with disable_torch_function():
            self._undo_swaps()
            self._restore_cells()
            self._restore_attributes()
            for node in self.reach.nodes.values():
                if paths := self._restore_node(node):
                    self.changed.append((node, paths))
        for value, path, content in self.reach.arrays:
            if content_of(value) != content:
                put_content(value, content)
                self.changed_arrays[id(value)] = path
        for cached, size in self.reach.caches:
            if cached.cache_info().currsize != size:
                cached.cache_clear()  # it may hold values of the trace
        for generator, path, state in self.reach.generators:
            if not _same_state(state, generator_state(generator)):
                self._moved.append(path)

    def _restore_node(self, node: Node) -> list[str]:
        owner = node.owner
        if node.names is None:
            if type(owner) not in _MUTABLE and not isinstance(owner, _MUTABLE):
                return []
            now = _content(owner)
            if len(now) == len(node.values) and all(map(lambda a, b: a is b, now, node.values)):
                return []
            if isinstance(owner, set):
                same = owner == {self._faked(value) for value in node.values}
            else:
                same = len(now) == len(node.values) and all(map(self._same, node.values, now))
            _set_content(owner, node.values)
            return [] if same else [node.path]
        attributes = owner if type(owner) is dict else getattr(owner, "__dict__", None)
        if attributes is None or isinstance(owner, (type, types.FunctionType)):
            return []
        changed = []
        for name, before in zip(node.names, node.values, strict=True):
            now = attributes.get(name, _missing)
            if now is not before:
                of_torch = name.startswith("_") and type(owner).__module__.startswith("torch.")  # such as fused SGD's
                if not of_torch and not self._same(before, now):
                    changed.append(name)
                attributes[name] = before
        if type(owner) is not dict and node.present is not None:
            for name in self.names.select(list(attributes)):
                if name not in node.present and name not in node.names and not self.reach._is_bound(owner, name):
                    if not isinstance(getattr(type(owner), name, None), functools.cached_property):
                        changed.append(name)
                    del attributes[name]
        return [f"{node.path}.{name}" for name in changed]

    def _same(self, before: Any, now: Any) -> bool:
        """Whether a place holds what it held before the trace."""
        if now is before or self._fake_of(before) is now:
            return True
        if isinstance(before, tuple) and type(now) is type(before):
            return len(now) == len(before) and all(map(self._same, before, now))
        if isinstance(before, frozenset) and type(now) is type(before):
            return bool(now == self._faked(before))
        if isinstance(now, torch.Tensor):
            return self.to_real.get(id(now)) is before
        if type(now) in (int, str) and now == self._fake_of(before):
            return True
        return type(now) is type(before) and isinstance(now, (bool, int, float, str)) and now == before

    def refuse(self, reachable: Reach) -> None:
        """Refuse what no program can repeat. Objects that only the trace itself held do not matter."""
        if self.error is not None:
            raise self.error
        found = {
            path: None
            for node, paths in self.changed
            for path in paths
            if id(node.owner) in reachable.nodes and not node.of_library
        }
        found.update((path, None) for value, path, _ in reachable.arrays if id(value) in self.changed_arrays)
        if found:
            raise SPMDError(
                f"The step sets {', '.join(found)}. The traced program runs no Python code: it would be set only once.",
                remedy="Return the value from the step, or keep it in a registered buffer.",
            )
        for path in self._moved:
            raise SPMDError(
                f"The step draws random numbers from {path}, which the traced program would not draw again.",
                remedy="Use torch's random functions, or draw outside of the step and pass the result as an argument.",
            )


_SYSTEM = (f"{torch.__path__[0]}/",)


def _shared_generators() -> list[tuple[str, Callable[[], Any]]]:
    """The generators that modules share, and how to get their states."""
    found: list[tuple[str, Callable[[], Any]]] = [("Python's random module", random.getstate)]
    numpy = sys.modules.get("numpy.random")
    return found if numpy is None else [*found, ("numpy.random", numpy.get_state)]


def _same_state(before: Any, after: Any) -> bool:
    if isinstance(before, tuple):
        return len(before) == len(after) and all(map(_same_state, before, after))
    return bool(before.tobytes() == after.tobytes() if hasattr(before, "tobytes") else before == after)


def _content(owner: Any) -> list[Any]:
    return [*owner, *owner.values()] if isinstance(owner, dict) else [*owner]


def _set_content(owner: Any, values: list[Any]) -> None:
    if isinstance(owner, dict):
        half = len(values) // 2
        owner.clear()
        owner.update(zip(values[:half], values[half:], strict=True))
    elif isinstance(owner, set):
        owner.clear()
        owner.update(values)
    elif isinstance(owner, list):
        owner[:] = values
    else:
        owner.clear()
        owner.extend(values)
