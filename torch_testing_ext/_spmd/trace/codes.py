"""The names that code may read: those of globals and attributes in the code objects that ran during a trace."""

from __future__ import annotations

import dis
import functools
import sysconfig
from dataclasses import dataclass
from types import CodeType
from typing import Any

from ..spmd_errors import is_user_file

_PATHS = sysconfig.get_paths()
_STANDARD = tuple({_PATHS["stdlib"], _PATHS["platstdlib"]})
_LIBRARIES = tuple({_PATHS["purelib"], _PATHS["platlib"]})
# Code with one of these names may read attributes whose names it does not contain.
_BY_COMPUTED_NAME = {"getattr", "hasattr", "vars", "dir", "eval", "exec", "attrgetter", "__dict__", "__getattribute__"}
_COPIERS = {"copy", "deepcopy", "asdict", "astuple", "replace", "fields", "__reduce_ex__"}
_GLOBAL_OPERATIONS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}


def is_library(filename: str) -> bool:
    """Whether a file belongs to an installed package."""
    return filename.startswith(_LIBRARIES)


def is_standard(filename: str) -> bool:
    """Whether a file belongs to Python's standard library."""
    return filename.startswith(_STANDARD) and not is_library(filename)


def standard_module(filename: str) -> str | None:
    """The top-level module of the standard library that a file belongs to, if any."""
    if filename.startswith("<frozen "):
        return filename[len("<frozen ") : -1].split(".")[0].removeprefix("_") or None
    if not is_standard(filename):
        return None
    inside = next(filename[len(path) + 1 :] for path in _STANDARD if filename.startswith(path))
    return inside.split("/")[0].removesuffix(".py")


# Packages that torch itself calls while it traces.
_OF_TORCH = (
    "sympy",
    "mpmath",
    "networkx",
    "numpy",
    "optree",
    "typing_extensions",
    "jinja2",
    "packaging",
    "_distutils_hack",
    "setuptools",
)
_SYSTEM = tuple(f"{path}/{name}{end}" for path in _LIBRARIES for name in _OF_TORCH for end in ("/", ".py"))
_PROMPTS = ("<stdin>", "<string>", "<ipython", "<doctest")


@functools.lru_cache(maxsize=4096)
def kind_of_file(filename: str) -> str:
    """The owner of the code in a file: "user", "library" if installed, or "system" (torch, Python, this package).

    A module of the standard library is of the system: it is part of what a step means, not of what it reads.
    """
    if filename.startswith("<"):
        return "user" if filename.startswith(_PROMPTS) else "system"
    if not is_user_file(filename) or is_standard(filename) or filename.startswith(_SYSTEM):
        return "system"
    return "library" if is_library(filename) else "user"


def kind_of_code(code: CodeType, module_globals: dict[str, Any]) -> str:
    """The owner of this code. Generated methods, as of dataclasses, belong to the module of their class."""
    if code.co_filename == "<string>":
        return kind_of_file(module_globals.get("__file__") or "<string>") if "__name__" in module_globals else "system"
    return kind_of_file(code.co_filename)


@dataclass(frozen=True)
class CodeReads:
    """The names in one code object."""

    globals: tuple[str, ...]
    attributes: frozenset[str]
    computes_names: bool


class _ByIdentity:
    """A code object as a key: equality of code objects ignores their files, and their hash is slow."""

    __slots__ = ("code",)

    def __init__(self, code: CodeType) -> None:
        self.code = code

    def __hash__(self) -> int:
        return id(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.code is other.code


def reads_of(code: CodeType) -> CodeReads:
    """The names of the globals and attributes that `code` may read."""
    return _reads_of(_ByIdentity(code))


@functools.lru_cache(maxsize=4096)
def _reads_of(key: _ByIdentity) -> CodeReads:
    code = key.code
    found: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_OPERATIONS:
            found[instruction.argval] = None
    names = {*code.co_names, *_names_in_constants(code.co_consts)}
    if "globals" in found:  # globals()["name"]
        found.update(dict.fromkeys(_names_in_constants(code.co_consts)))
    return CodeReads(tuple(found), frozenset(names), bool(names & (_BY_COMPUTED_NAME | _COPIERS)))


def _names_in_constants(constants: tuple[Any, ...]) -> set[str]:
    """Strings that may be names of attributes, such as those for `getattr` and in class patterns."""
    found: set[str] = set()
    for constant in constants:
        if isinstance(constant, str):
            found.update(part for part in constant.split(".") if part.isidentifier())
        elif isinstance(constant, tuple):
            found |= _names_in_constants(constant)
    return found


class Names:
    """The names of attributes that the code of a step may read. It grows while the step runs."""

    def __init__(self) -> None:
        self.known = {"_parameters", "_buffers", "_modules"}  # which modules read by these names as texts
        self.all = False

    def add(self, code: CodeType, of_system: bool) -> bool:
        """Add the names of `code`; returns whether there are new ones."""
        before = len(self.known), self.all
        if of_system:
            self.known.update(code.co_names)
        else:
            reads = reads_of(code)
            self.known |= reads.attributes
            self.all = self.all or reads.computes_names
        return before != (len(self.known), self.all)

    def select(self, attributes: Any) -> list[str]:
        """The keys of `attributes` that may be read."""
        if self.all:
            return [name for name in attributes if isinstance(name, str)]
        return [name for name in attributes if name in self.known]
