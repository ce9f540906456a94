"""PyTorch's module names give our modules: stand-ins, originals, bases."""

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch_testing_ext._process import interpreters
from torch_testing_ext._process.code_names import names_in
from torch_testing_ext._testing.bases import invocation
from torch_testing_ext.launch import ERROR_EXIT_CODE, Expected, Outcome, RankEnding, RankReport, Verdict

from . import mapping

# --------------------------------------------------------------------------------------------------------------------
# PyTorch's own modules in a drop-in run, loaded next to their stand-ins, and members of its TestCase.
#
# A module is loaded only when one of its names is needed, since loading takes seconds and may touch the accelerator.
# The names that were needed are recorded for --explain. Our TestCase gets the members that only PyTorch's has:
# PyTorch's functions, bound to the test. Which ones exist is read from the source, and loads nothing.

loaded: dict[str, ModuleType] = {}
originals_requested: dict[str, set[str]] = {}
# Called with each module of PyTorch's that was loaded.
after_loading: list[Callable[[ModuleType], None]] = []


def load_original(name: str) -> ModuleType:
    """PyTorch's module of this name. If this torch has none, raises AttributeError, as for a missing name."""
    if name not in loaded:
        parent = importlib.import_module(name.rpartition(".")[0])
        # Whatever sys.modules has.
        spec = importlib.machinery.PathFinder.find_spec(name, parent.__path__)
        if spec is None or spec.loader is None:
            raise AttributeError(f"this torch has no module {name} in which to look for it")
        module = loaded[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del loaded[name]
            raise
        for callback in after_loading:
            callback(module)
    return loaded[name]


def record_original(module: str, name: str) -> None:
    """Record that a name was taken from PyTorch, unless torch itself asked for it."""
    if not _caller().startswith("torch."):
        originals_requested.setdefault(module, set()).add(name)


def _caller() -> str:
    """The module that looks the name up: the first outside this package and importlib."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _name_of(frame.f_globals).startswith(("importlib", __package__)):
        frame = frame.f_back
    return _name_of(frame.f_globals)


def _name_of(module_globals: dict[str, object]) -> str:
    return str(module_globals.get("__name__", ""))


# -- members of PyTorch's TestCase

HOME = f"{mapping.THEIR_KIT}.common_utils"


def add_missing_members(ours: type) -> None:
    """Give our TestCase the members that only PyTorch's has. Safe to call again."""
    if hasattr(ours, "__getattr__"):
        return

    def __getattr__(self: Any, name: str) -> Any:
        if name not in _members_of_theirs():
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        member = inspect.getattr_static(load_original(HOME).TestCase, name)
        record_original(HOME, f"TestCase.{name}")
        return member.__get__(self, type(self)) if hasattr(member, "__get__") else member

    ours.__getattr__ = __getattr__  # type: ignore[attr-defined]
    for name, value in _constants_of_theirs().items():
        if not hasattr(ours, name):
            # It is also looked up on the class, where __getattr__ does not apply.
            setattr(ours, name, value)


@functools.cache
def _their_class() -> ast.ClassDef:
    node = mapping.find_class(mapping.find_source(HOME), "TestCase")
    assert node is not None
    return node


@functools.cache
def _members_of_theirs() -> frozenset[str]:
    return frozenset(mapping.defined_by(_their_class()))


def _constants_of_theirs() -> dict[str, Any]:
    constants = {}
    for node in _their_class().body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Constant):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                constants[target.id] = node.value.value
    return constants


# --------------------------------------------------------------------------------------------------------------------
# Give PyTorch's own test classes our bases, and so our launch, where that is safe.
#
# It is safe if the class neither overrides nor uses the private members of PyTorch's base: those by which it starts
# and watches ranks, and which ours lacks. Other bases, such as TestCase, start no ranks and are always replaced. The
# class itself is changed, through its `__bases__`: the super() calls of its methods would not know a copy.


@dataclass(frozen=True)
class LaunchChoice:
    """Whether a PyTorch class gets our launch; if not, which members prevent it."""

    name: str
    base: str
    private_members: tuple[str, ...]

    def __str__(self) -> str:
        if self.private_members:
            return f"  {self.name}: PyTorch's launch, since it uses or overrides {', '.join(self.private_members)}"
        return f"  {self.name}: our launch, through our {self.base}"


_choices: dict[str, LaunchChoice] = {}


def rebase_classes(module: ModuleType) -> None:
    """Replace the bases of the test classes that a module of PyTorch's defines, where that is safe."""
    for cls in list(vars(module).values()):
        is_its_own = inspect.isclass(cls) and cls.__module__ == module.__name__
        if not is_its_own or _has_counterpart(cls):
            continue
        bases = tuple(_choose(cls, base) for base in cls.__bases__)
        if bases != cls.__bases__:
            cls.__bases__ = bases


def explain_rebase() -> list[str]:
    """Lines that say whose launch each class of PyTorch's uses."""
    if not _choices:
        return []
    return ["Classes of PyTorch's that start ranks:", *map(str, _choices.values())]


def _has_counterpart(cls: type) -> bool:
    ours = mapping.module_on(mapping.Side.OURS, cls.__module__)
    return ours is not None and hasattr(importlib.import_module(ours), cls.__name__)


def _choose(cls: type, base: type) -> type:
    """The base that a class gets in place of one that it has."""
    pair = _home_of(base)
    if pair is None:
        return base
    name = base.__name__
    private_members = sorted(_used_by(cls) & _private_members_of_their(name))
    if name in mapping.LAUNCHING_BASES:
        _choices[cls.__qualname__] = LaunchChoice(cls.__qualname__, name, tuple(private_members))
    home = load_original(pair.theirs) if private_members else importlib.import_module(pair.ours)
    chosen: type = getattr(home, name)
    return chosen


def _home_of(base: type) -> mapping.MirroredModule | None:
    """The mirrored module that defines this test base on both sides, if there is one."""
    if not issubclass(base, unittest.TestCase):
        return None
    for pair in mapping.MIRRORED:
        file = mapping.source_of(pair.theirs, mapping.installed_torch())
        if file is None or mapping.find_class(file, base.__name__) is None:
            continue
        home = importlib.import_module(pair.ours)
        ours = getattr(home, base.__name__, None)
        if ours is not None and (base is ours or base.__module__ == pair.theirs):
            return pair
    return None


# -- the names that a class uses, and the private members of PyTorch's launch


def _used_by(cls: type) -> set[str]:
    """All names that a class defines or that its functions look up."""
    used = set(vars(cls))
    for value in vars(cls).values():
        for code in _codes_of(value):
            used |= names_in(code)
    return used


def _codes_of(value: Any) -> Iterator[CodeType]:
    match value:
        case FunctionType():
            yield value.__code__
            yield from _codes_of(getattr(value, "__wrapped__", None))
        case classmethod() | staticmethod():
            yield from _codes_of(value.__func__)
        case property():
            for part in (value.fget, value.fset):
                yield from _codes_of(part)


@functools.cache
def _private_members_of_their(base: str) -> frozenset[str]:
    """The members that PyTorch's launching base and its bases have and ours lacks."""
    module = mapping.LAUNCHING_BASES.get(base)
    if module is None:
        return frozenset()
    home = mapping.module_on(mapping.Side.OURS, module)
    assert home is not None
    classes = getattr(importlib.import_module(home), base).__mro__
    theirs = set().union(*(_members_of_their(cls.__name__) for cls in classes))
    ours = set().union(*(_members_of(cls) for cls in classes))
    return frozenset(theirs - ours)


def _members_of_their(base: str) -> set[str]:
    module = mapping.LAUNCHING_BASES.get(base)
    if module is None:
        return set()
    file = mapping.source_of(module, mapping.installed_torch())
    return set() if file is None else _members_in(file, base)


def _members_of(cls: type) -> set[str]:
    """The members of a class of ours or of a base of it, including those of its instances."""
    members = set(vars(cls))
    if cls.__module__ != "builtins":
        members |= _members_in(Path(inspect.getfile(cls)), cls.__name__)
    return members


def _members_in(file: Path, name: str) -> set[str]:
    """The members of a class by its source; none if the file has no such class."""
    node = mapping.find_class(file, name)
    return set() if node is None else mapping.members_of(node)


# --------------------------------------------------------------------------------------------------------------------
# Make PyTorch's module names give our modules, for the life of this process and in every rank that it starts.
#
#     from torch_testing_ext.upstream import drop_in
#     drop_in.install()            # before a test file is imported
#
# Each mirrored module gets a stand-in. A name looked up in it is ours if we have it, and PyTorch's otherwise. The
# stand-ins stay after the import, since tests import inside functions and patch by name. All other modules see them,
# PyTorch's included, so that classes in those get our bases too; the rules for bases, above, decide which of them may.

SKIP_CODES = frozenset(range(72, 90))


def install() -> None:
    """Map PyTorch's names to ours, here and in interpreters of ranks. Imports no torch. Safe to call again."""
    if is_installed():
        return
    sys.meta_path.insert(0, _Finder())
    after_loading.append(rebase_classes)
    interpreters.RUN_FIRST.append(f"from {__name__} import install; install()")
    invocation.verdict_note = remark_on_failure
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
    kinds = mapping.defined_in(mapping.find_source(module))
    return sorted(name for name in requested if kinds.get(name) is not mapping.NameKind.IMPORTED)


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


# -- what PyTorch's base would have said


def remark_on_failure(reports: Sequence[RankReport], expected: Expected, verdict: Verdict) -> str:
    """The text to add to a failure that PyTorch's base, which judges by exit codes, would not have reported; or ""."""
    clean = (Outcome.PASSED, Outcome.SKIPPED)
    if verdict.outcome in clean:
        return ""
    theirs = outcome_of_pytorch(reports, expected)
    if theirs not in clean:
        return ""
    return f"This is stricter than PyTorch, where the test would have {theirs.value}: its base judges by rank 0 alone."


def outcome_of_pytorch(reports: Sequence[RankReport], expected: Expected) -> Outcome:
    """The outcome that PyTorch's MultiProcessTestCase gives a test whose ranks end like this."""
    for report in reports:
        # PyTorch waits for such a rank.
        if report.ending in (RankEnding.STOPPED, RankEnding.LOST):
            return Outcome.TIMEOUT
    if any(report.code == ERROR_EXIT_CODE for report in reports):
        return Outcome.ERROR
    if expected.any_code:
        return Outcome.PASSED
    code = reports[0].code
    if code in SKIP_CODES:
        return Outcome.SKIPPED
    if code == (expected.code or 0):
        return Outcome.PASSED
    return Outcome.FAILED
