"""Makes PyTorch's module names give our modules, for the life of this process and in every rank that it starts.

    from torch_testing_ext.upstream import drop_in
    drop_in.install()            # before a test file is imported

Each mirrored module gets a stand-in. A name looked up in it is ours if we have it, and PyTorch's otherwise. The
stand-ins stay after the import, since tests import inside functions and patch by name. All other modules see them,
PyTorch's included, so that classes in those get our bases too; `rebasing` decides which of them may.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch_testing_ext._process import interpreters
from torch_testing_ext._tests import launcher_variables
from torch_testing_ext.launch.aspects import REMARKS

from . import defined_names, mapping
from .handler_variables import for_import as for_import, use_folder as use_folder
from .missing_members import add_missing_members
from .originals import after_loading, load_original, loaded, originals_requested, record_original
from .other_versions import advice as advice
from .outcomes_of_pytorch import remark_on_failure
from .rebasing import explain_rebase, rebase_classes


def install() -> None:
    """Map PyTorch's names to ours, here and in interpreters of ranks. Imports no torch. Safe to call again."""
    if is_installed():
        return
    sys.meta_path.insert(0, _Finder())
    after_loading.append(rebase_classes)
    interpreters.RUN_FIRST.append(f"from {__name__} import install; install()")
    REMARKS.add(remark_on_failure)
    # PyTorch's ranks have none, and a test of its own says so.
    launcher_variables.of_each_rank.discard(launcher_variables.TORCHRUN.local_rank)
    for pair in mapping.MIRRORED:
        if pair.theirs in sys.modules:
            _replace(pair)
    for name, module in list(sys.modules.items()):
        if _is_theirs_alone(name):
            rebase_classes(module)


def is_installed() -> bool:
    """Whether this process maps PyTorch's names to ours."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def explain() -> str:
    """The names that came from PyTorch so far, and whose launch PyTorch's classes use."""
    lines = []
    for module, requested in sorted(originals_requested.items()):
        defined = _defined_by_kit(module, requested)
        if defined:
            lines.append(f"  {module}: {', '.join(defined)}")
    title = "Names that came from PyTorch:" if lines else "All names that were used are ours."
    return "\n".join([title, *lines, *explain_rebase()])


def _defined_by_kit(module: str, requested: set[str]) -> list[str]:
    """Without the names that the module only imports from elsewhere, which `import *` requests too."""
    kinds = defined_names.defined_in(mapping.find_source(module))
    return sorted(name for name in requested if kinds.get(name) is not defined_names.NameKind.IMPORTED)


class StandIn(ModuleType):
    """Takes the place of one of PyTorch's modules. It looks up all names but those with double underscores."""

    __ours__: str

    def __getattr__(self, name: str) -> Any:
        """Our value of this name, or else PyTorch's."""
        if name == "__all__":
            return [public for public in dir(self) if not public.startswith("_")]
        if _is_own(name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        ours = _import_ours(self.__ours__)
        try:
            return getattr(ours, name)
        except AttributeError:
            pass
        theirs = getattr(load_original(self.__name__), name)
        record_original(self.__name__, name)
        return theirs

    def __setattr__(self, name: str, value: Any) -> None:
        is_module_in_this = getattr(value, "__name__", None) == f"{self.__name__}.{name}"
        if _is_own(name) or is_module_in_this:
            super().__setattr__(name, value)
            return
        for holder in _holders(self, name):
            setattr(holder, name, value)

    def __delattr__(self, name: str) -> None:
        for holder in _holders(self, name):
            delattr(holder, name)

    def __dir__(self) -> list[str]:
        theirs = load_original(self.__name__)
        return sorted(name for name in dir(theirs) if not _is_own(name))

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """The namespace for mock.patch and dataclasses; with PyTorch's names only if its module is loaded already."""
        ours = _import_ours(self.__ours__)
        theirs = loaded.get(self.__name__)
        names = {} if theirs is None else dict(vars(theirs))
        names.update(vars(ours))
        return _Names(ours, names)


class _Names(dict[str, Any]):
    """The names of a stand-in. mock.patch looks here for the value to restore, which we may import on first use."""

    def __init__(self, ours: ModuleType, names: dict[str, Any]):
        super().__init__(names)
        self._ours = ours

    def __getitem__(self, name: str) -> Any:
        if hasattr(self._ours, name):
            return getattr(self._ours, name)
        return super().__getitem__(name)


def _holders(stand_in: StandIn, name: str) -> list[ModuleType]:
    """The modules in which a patch must change this name: our modules import names from one another."""
    ours = _import_ours(stand_in.__ours__)
    if not hasattr(ours, name):
        return [load_original(stand_in.__name__)]
    value = getattr(ours, name)
    missing = object()
    holders = []
    for key, module in sys.modules.items():
        if not key.startswith(f"{mapping.OUR_KIT}."):
            continue
        if module is ours or vars(module).get(name, missing) is value:
            holders.append(module)
    return holders


def _is_own(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _import_ours(name: str) -> ModuleType:
    module = importlib.import_module(name)
    if hasattr(module, "TestCase"):
        add_missing_members(module.TestCase)
    return module


def _make(name: str, ours: str) -> StandIn:
    stand_in = StandIn(name)
    stand_in.__ours__ = ours
    return stand_in


def _replace(pair: mapping.MirroredModule) -> None:
    """Replace a module that was imported already. References to it stay; later imports get the stand-in."""
    module = sys.modules[pair.theirs]
    loaded[pair.theirs] = module
    stand_in = _make(pair.theirs, pair.ours)
    for name in ("__file__", "__spec__", "__package__", "__loader__"):
        setattr(stand_in, name, getattr(module, name, None))
    if hasattr(module, "__path__"):
        stand_in.__path__ = module.__path__
        for name, inner in list(sys.modules.items()):
            package, _, child = name.rpartition(".")
            if package == pair.theirs:
                setattr(stand_in, child, inner)
    sys.modules[pair.theirs] = stand_in
    parent, _, child = pair.theirs.rpartition(".")
    setattr(sys.modules[parent], child, stand_in)
    rebase_classes(module)


class _Finder(importlib.abc.MetaPathFinder):
    """The first finder: gives stand-ins for mirrored modules, and rebases the classes of PyTorch's other modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a stand-in, or of a module of PyTorch's that is rebased after its import."""
        ours = mapping.module_on(mapping.Side.OURS, fullname)
        if ours is None and not _is_theirs_alone(fullname):
            return None
        real = importlib.machinery.PathFinder.find_spec(fullname, path)
        if ours is not None:
            return _spec_of_stand_in(fullname, ours, real)
        if real is not None and real.loader is not None:
            real.loader = _RebasingLoader(real.loader)
        return real


def _spec_of_stand_in(
    name: str, ours: str, real: importlib.machinery.ModuleSpec | None
) -> importlib.machinery.ModuleSpec:
    """`real`: the spec of PyTorch's module, if this torch has it."""
    spec = importlib.machinery.ModuleSpec(name, _StandInLoader(ours))
    if real is not None:
        spec.origin = real.origin
        spec.has_location = True
        # The other modules of a package are PyTorch's.
        spec.submodule_search_locations = real.submodule_search_locations
    elif any(pair.theirs.startswith(f"{name}.") for pair in mapping.MIRRORED):
        # A package that this torch lacks, of which we have modules.
        spec.submodule_search_locations = []
    return spec


class _StandInLoader(importlib.abc.Loader):
    def __init__(self, ours: str):
        self._ours = ours

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _make(spec.name, self._ours)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are looked up on use."""


class _RebasingLoader(importlib.abc.Loader):
    """Runs the real loader, then rebases the module's classes."""

    def __init__(self, real: Any):
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        rebase_classes(module)


def _is_theirs_alone(name: str) -> bool:
    """Whether a module of PyTorch's has no counterpart, but may define bases of test classes."""
    if name in mapping.OTHER_TEST_BASES:
        return True
    if not name.startswith(f"{mapping.THEIR_KIT}."):
        return False
    return mapping.module_on(mapping.Side.OURS, name) is None
