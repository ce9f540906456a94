"""The basics of every process that we start: signals, messages, the event loop, files, the user's shell, its end.

It knows nothing of tests, ranks or accelerators, and imports nothing of this package.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import machinery
from types import ModuleType

_PACKAGE = __name__.partition(".")[0]


class OwnImports:
    """Finds our modules, and has what they import come from Python's library where files of the user's hide it.

    The folder of a program or test is in front of the library in sys.path: `fcntl.py` in it hides Python's module from
    all that import it later. Tests that run with torch and unittest run with us, too: a module of ours gets Python's
    `fcntl`, the user's modules get the user's. pytest's finder, which would rewrite our modules, is passed over.
    """

    # What else our imports need, and a file beside a test may hide.
    _REQUIRED = frozenset(("expecttest", "hypothesis"))
    _NAMES = sys.stdlib_module_names - {*sys.builtin_module_names} | _REQUIRED
    _LIBRARY = os.path.dirname(os.__file__)

    def __init__(self) -> None:
        # sys.path when it was looked through last, and what is hidden by it: the beginning of the hiding path, by name.
        self._path: list[str] = []
        self._hidden: dict[str, str] = {}
        # The names that are looked for in the library now.
        self._open: frozenset[str] = frozenset()
        # The modules that were found there.
        self._found: dict[str, ModuleType] = {}

    def go_first(self) -> None:
        """Come before all finders that there are now, instead of that of an earlier import of this package."""
        sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if type(finder).__module__ != __name__)]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> machinery.ModuleSpec | None:
        if name in self._open:
            found = self._find_behind(name)
            if found is None:
                # On this platform.
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return found
        if not name.startswith(f"{_PACKAGE}."):
            return None
        for finder in sys.meta_path:
            # Those of old packages know `find_module` alone; that of pytest marks modules to rewrite.
            is_ours = type(finder).__module__ == __name__
            if is_ours or hasattr(finder, "mark_rewrite") or not hasattr(finder, "find_spec"):
                continue
            if (spec := finder.find_spec(name, path, target)) is not None:
                loader = spec.loader
                # Not one that brings back a module which was imported before. All modules of a zip file have the same.
                if loader is not None and hasattr(loader, "get_code") and "exec_module" not in vars(loader):
                    vars(loader)["exec_module"] = partial(self._run, loader.exec_module)
                return spec
        return None

    def _run(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        with self():
            run(module)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Have all imports of this process find what the user's files hide."""
        hidden = {} if self._open else self._look()
        names = frozenset(name for name in hidden if name not in sys.modules or self._hides(name, sys.modules[name]))
        if not names:
            # To look at each module would copy thousands of pages in a process that was forked.
            yield
            return
        theirs = {name: module for name, module in sys.modules.items() if self._hides(name, module)}
        for name in theirs:
            del sys.modules[name]
        sys.modules.update((name, module) for name, module in self._found.items() if _top(name) in names)
        self._open = names
        try:
            yield
        finally:
            self._open = frozenset()
            for name in [name for name in sys.modules if _top(name) in names]:
                self._found[name] = sys.modules.pop(name)
            sys.modules.update(theirs)

    def _look(self) -> dict[str, str]:
        """Look through the part of sys.path that comes before Python's library."""
        if self._path != sys.path:
            self._path = [*sys.path]
            self._hidden = {}
            for entry in self._path[: self._end_of_front()]:
                self._hidden = {**dict(self._in_folder(entry)), **self._hidden}
            for name in self._REQUIRED & self._hidden.keys():
                # A package is another version, for the tests, too. Or it is to come from that folder.
                if self._hidden[name].endswith(os.sep) or self._find_behind(name) is None:
                    del self._hidden[name]
        return self._hidden

    def library_first(self, path: Sequence[str]) -> list[str]:
        """These entries of sys.path, with Python's library in front, too."""
        folders = self._LIBRARY, os.path.join(self._LIBRARY, "lib-dynload")
        return [*(entry for entry in path if entry in folders), *path]

    def _end_of_front(self) -> int:
        return self._path.index(self._LIBRARY) if self._LIBRARY in self._path else 0

    def _in_folder(self, entry: str) -> Iterator[tuple[str, str]]:
        try:
            files = os.listdir(entry or ".")
        except (OSError, TypeError, ValueError):
            # No folder, or not even a path, which Python ignores, too.
            return
        for file in files:
            name, _, suffix = file.partition(".")
            if name in self._NAMES:
                path = os.path.join(os.path.abspath(entry), file)
                package = os.path.join(path, "")
                if f".{suffix}" in _SUFFIXES:
                    yield name, path
                elif not suffix and any(os.path.exists(f"{package}__init__{each}") for each in _SUFFIXES):
                    yield name, package

    def _hides(self, name: str, module: ModuleType) -> bool:
        start = self._hidden.get(_top(name))
        return start is not None and os.path.abspath(getattr(module, "__file__", None) or ".").startswith(start)

    def _find_behind(self, name: str) -> machinery.ModuleSpec | None:
        return machinery.PathFinder.find_spec(name, self._path[self._end_of_front() :])


_SUFFIXES = machinery.all_suffixes()


def _top(name: str) -> str:
    return name.partition(".")[0]


# For an import in a function.
own_imports = OwnImports()
own_imports.go_first()
