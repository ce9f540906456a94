"""Modules that a stage has imported for its programs, hidden from them until they import them.

A program finds `sys.modules` as a new interpreter has it. When it imports a hidden module, the module appears, together
with all that its import would have brought. First it is compared with the module that the program would have got:
nothing in front of it in `sys.path` may have its name, and the variables that its import has read must have the same
values. Otherwise the program has to start again in a new interpreter, which it does before any of its own code has
used the module.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

# Variables that native libraries read when they are loaded: no event shows that.
_NATIVE = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "NUMEXPR_", "DNNL_", "ONEDNN_"),
    *("TORCH", "PYTORCH", "ATEN_", "C10_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NCCL_", "GLOO_", "HIP_", "HSA_"),
    *("ROCR_", "ROCM_", "ZE_", "SYCL_", "TBB_", "KINETO_", "NPY_", "NUMPY_", "XLA_", "TP_"),
)
# Of these, the ones that are read when they are needed.
_READ_LATER = ("TORCH_TESTING_EXT_", "PYTORCH_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK")
# Their native parts cannot be initialised a second time.
_IMPORTED_ONCE = ("torch", "numpy")
_DEFINED = (type, types.FunctionType, types.BuiltinFunctionType)


def native(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that native libraries may have read."""
    return {k: v for k, v in environ.items() if k.startswith(_NATIVE) and not k.startswith(_READ_LATER)}


class RecordingEnviron(os._Environ):  # type: ignore[type-arg]
    """The class of `os.environ` while a stage imports: it notes which variables are read."""

    _plain: type = os._Environ
    _seen: ClassVar[set[str]] = set()

    @classmethod
    def begin(cls) -> None:
        cls._seen.clear()
        os.environ.__class__ = cls

    @classmethod
    def end(cls) -> frozenset[str]:
        """The variables that were read."""
        os.environ.__class__ = cls._plain
        return frozenset(cls._seen)

    def __getitem__(self, name: str) -> str:
        self._seen.add(name)
        value: str = super().__getitem__(name)
        return value

    def __iter__(self) -> Any:
        for name in super().__iter__():
            self._seen.add(name)
            yield name


class StashedLayer:
    """The modules that one import of a stage has brought, with the state that it has changed."""

    def __init__(
        self,
        names: Iterable[str],
        imported: str = "",
        seen: Mapping[str, str | None] | None = None,
        puts: Mapping[str, str] | None = None,
    ):
        """`imported`: the module that brought them. `seen`, `puts`: the variables that were read, and set."""
        self.modules = {name: sys.modules[name] for name in names}
        self.seen, self.puts = seen or {}, puts or {}
        self.native: dict[str, str] | None = None  # the variables that native libraries may have read
        self.filters: list[Any] = []  # of warnings
        # The modules that are to blame for what the import has changed, as far as that is known.
        tops = (*_IMPORTED_ONCE, imported.partition(".")[0])
        self.main = {name for name in self.modules if name.partition(".")[0] in tops}
        self.shown = False  # whether a program has imported one of these

    def changed(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """The variables that have other values than the import has seen."""
        seen = dict(self.seen)
        if self.native is not None:
            seen.update((name, self.native.get(name)) for name in {*native(environ), *self.native})
        return {name: environ.get(name) for name, value in seen.items() if environ.get(name) != value}


class Stash:
    """The modules of all stages above a program, and the finder that brings them back."""

    def __init__(self, startup: Iterable[str], path: list[str]):
        self._startup, self._path = frozenset(startup), path
        self.layers: list[StashedLayer] = []
        self._layer_of: dict[str, StashedLayer] = {}
        self._needs: dict[str, list[str]] = {}
        self.on_conflict: Callable[[str, dict[str, str | None], list[str]], object] = lambda *told: None

        atexit.register(self._spare)  # before anything else registers a function, so that it is called last

    def _spare(self) -> None:
        """Keep the interpreter from taking these modules apart at its end, which takes a third of a second."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        for name in self._layer_of:
            sys.modules.pop(name, None)

    def new_names(self) -> list[str]:
        return [name for name in sys.modules if name not in self._startup and name not in self._layer_of]

    def add(self, layer: StashedLayer) -> None:
        self.layers.append(layer)
        self._layer_of.update(dict.fromkeys(layer.modules, layer))
        whole = "torch" in layer.modules  # this is what `import torch` brings: with torch, all of it
        for name, module in layer.modules.items():
            top, parent = name.partition(".")[0], name.rpartition(".")[0]
            needs = {parent} if parent else set()
            if whole:
                needs = {top} if name != top else {other for other in layer.modules if other.startswith(f"{name}.")}
                needs |= set(layer.modules) if name == "torch" else set()
            parts = {one for one in layer.modules if one.rpartition(".")[0] == name}
            # Those that it has made (`os.path`, `typing.io`), and not imported.
            needs |= {one for one in parts if getattr(layer.modules[one], "__spec__", None) is None}
            self._needs[name] = sorted((needs | set(_names_used_by(module))) & self._layer_of.keys() - {name})

    def hide(self) -> None:
        """Make `sys.modules` that of a new interpreter. An attribute of a package is hidden with its submodule."""
        for name in [name for name in sys.modules if name not in self._startup]:
            del sys.modules[name]
        for layer in self.layers:
            if "torch" in layer.modules:  # what its import does not bring is in a later layer
                continue
            for name, module in layer.modules.items():
                parent, _, child = name.rpartition(".")
                owner = self._module(parent)
                if owner is not None and vars(owner).get(child) is module:
                    delattr(owner, child)
        sys.meta_path.insert(0, self)

    def _module(self, name: str) -> Any:
        return self._layer_of[name].modules[name] if name in self._layer_of else None

    # -- the finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._layer_of:
            return None
        wanted = self._closure(name)
        layers = [layer for layer in self.layers if any(one in layer.modules for one in wanted)]
        if (why := self._other_module(wanted)) is not None:
            if name.partition(".")[0] not in _IMPORTED_ONCE:
                return None  # the program gets a new module of this name
            self.on_conflict(why, {}, self._new_entries())
        for layer in layers:
            if not layer.shown and (changed := layer.changed(os.environ)):
                self.on_conflict(f"the program sets {min(changed)}, which its imports read", changed, [])
        module = self._module(name)
        own = getattr(module, "__spec__", None)
        loader: Any = _Loader(self, module, wanted, layers)
        spec = importlib.machinery.ModuleSpec(name, loader, origin=getattr(own, "origin", None))
        for attribute in ("submodule_search_locations", "has_location", "cached"):
            with contextlib.suppress(AttributeError):
                setattr(spec, attribute, getattr(own, attribute))
        return spec

    def _closure(self, name: str) -> list[str]:
        found, open_ = {name}, [name]
        while open_:
            for other in self._needs[open_.pop()]:
                if other not in found:
                    found.add(other)
                    open_.append(other)
        return [one for layer in self.layers for one in layer.modules if one in found]

    def _new_entries(self) -> list[str]:
        """The entries of sys.path that the stage did not have, and that come before any of its own."""
        own = [index for index, entry in enumerate(sys.path) if entry in self._path]
        last = own[-1] if own else len(sys.path)
        return [os.path.abspath(entry or ".") for entry in sys.path[:last] if entry not in self._path]

    def _is_shadowed(self, name: str, entries: list[str]) -> bool:
        """Whether the program would get another module of this name than the stage has got."""
        spec = importlib.machinery.PathFinder.find_spec(name, entries)
        if spec is None or spec.loader is None:
            return False
        ours = getattr(getattr(self._module(name), "__spec__", None), "origin", None)
        return not isinstance(ours, str) or os.path.realpath(ours) != os.path.realpath(spec.origin or "")

    def _other_module(self, wanted: list[str]) -> str | None:
        """Why the program would not get all of these modules."""
        missing = [entry for entry in self._path if entry not in sys.path]
        if missing:
            return f"sys.path has no {missing[0]} any more"
        for name in wanted:
            if name in sys.modules and sys.modules[name] is not self._module(name):
                return f"the program has a module {name} of its own"
        entries = self._new_entries()
        for name in sorted({name.partition(".")[0] for name in wanted if name not in sys.modules}):
            if self._is_shadowed(name, entries):
                return f"the project has a module {name} of its own"
        return None

    def show(self, wanted: list[str], layers: list[StashedLayer]) -> None:
        for layer in layers:
            if not layer.shown and (set(wanted) & layer.modules.keys() & layer.main):
                layer.shown = True
                os.environ.update(layer.puts)
                _add_filters(layer.filters)
        for name in wanted:
            if name not in sys.modules:
                sys.modules[name] = module = self._module(name)
                parent, _, child = name.rpartition(".")
                owner = self._module(parent)
                if owner is not None and child not in vars(owner):
                    setattr(owner, child, module)


def _add_filters(filters: list[Any]) -> None:
    import warnings

    for one in reversed(filters):
        if one not in warnings.filters:
            warnings.simplefilter("default")  # has the caches of the module renewed
            warnings.filters[0] = one  # type: ignore[index]


def _names_used_by(module: Any) -> Iterable[str]:
    """The modules from which the globals of a module come."""
    for value in list(getattr(module, "__dict__", {}).values()):
        kind = type(value)  # not isinstance(): it may run code of the value
        if issubclass(kind, types.ModuleType):
            yield vars(value).get("__name__", "")
        else:
            name = value.__module__ if issubclass(kind, _DEFINED) else kind.__module__
            if isinstance(name, str):
                yield name


class _Loader:
    """Brings one module back."""

    def __init__(self, stash: Stash, module: Any, wanted: list[str], layers: list[StashedLayer]):
        self._stash, self._module, self._wanted, self._layers = stash, module, wanted, layers
        self._spec = getattr(module, "__spec__", None)

    def __getattr__(self, name: str) -> Any:  # some ask a loader for the source or the code of a module
        return getattr(getattr(self._spec, "loader", None), name)

    def create_module(self, spec: Any) -> Any:
        return self._module

    def exec_module(self, module: Any) -> None:
        with contextlib.suppress(AttributeError):
            module.__spec__ = self._spec
        self._stash.show(self._wanted, self._layers)
