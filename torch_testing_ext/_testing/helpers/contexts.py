"""Context managers for settings and files; each restores the previous state at its end."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from torch_testing_ext._process.temporary_variables import changed_environment as changed_environment

F = TypeVar("F", bound=Callable[..., Any])


def within(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[F], F]:
    """Decorator: run each call of a function in a context of its own.

    Unlike contextlib's own, the wrapper is a function of this package: the needs of a test below it stay certain.
    """

    def decorate(fn: F) -> F:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with context():
                return fn(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate


class DeterministicGuard:
    """Turns deterministic algorithms on or off for the length of a `with`."""

    def __init__(self, deterministic: bool, *, warn_only: bool = False, fill_uninitialized_memory: bool = True) -> None:
        self.deterministic = deterministic
        self.warn_only = warn_only
        self.fill_uninitialized_memory = fill_uninitialized_memory

    @classmethod
    def _current_state(cls) -> DeterministicGuard:
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            fill_uninitialized_memory=torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        )

    def _update(self) -> None:
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill_uninitialized_memory  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        self._restore = self._current_state()
        self._update()

    def __exit__(self, *_: object) -> None:
        self._restore._update()


@contextlib.contextmanager
def _changed(change: Callable[[Any], object], current: Callable[[], Any], value: Any) -> Iterator[None]:
    before = current()
    change(value)
    try:
        yield
    finally:
        change(before)


def set_default_dtype(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    return _changed(torch.set_default_dtype, torch.get_default_dtype, dtype)


def set_default_tensor_type(tensor_type: Any) -> contextlib.AbstractContextManager[None]:
    return _changed(torch.set_default_tensor_type, lambda: torch.tensor([]).type(), tensor_type)


def set_warn_always_context(new_val: bool) -> contextlib.AbstractContextManager[None]:
    """Set whether torch repeats warnings that it otherwise gives once per process."""
    return _changed(torch.set_warn_always, torch.is_warn_always_enabled, new_val)


def set_cwd(path: str) -> contextlib.AbstractContextManager[None]:
    return _changed(os.chdir, os.getcwd, path)


@contextlib.contextmanager
def disable_gc() -> Iterator[None]:
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def check_leaked_tensors(limit: int = 1, matched_type: Any = torch.Tensor) -> Iterator[list[Any]]:
    """Warn of tensors that became garbage which only the cycle collector finds, and collect them in the list.

    With `objgraph` installed, draw the objects that refer to the first `limit` of them.
    """
    gc.collect()
    flags, known = gc.get_debug(), len(gc.garbage)
    gc.set_debug(gc.DEBUG_SAVEALL)
    leaked: list[Any] = []
    try:
        yield leaked
        gc.collect()
        leaked.extend(item for item in gc.garbage[known:] if isinstance(item, matched_type))
        if leaked:
            _report_leak(leaked, limit)
    finally:
        gc.set_debug(flags)
        del gc.garbage[known:]


def _report_leak(leaked: list[Any], limit: int) -> None:
    kinds = ", ".join(sorted({type(item).__name__ for item in leaked}))
    warnings.warn(
        f"{len(leaked)} tensors were found in the garbage ({kinds}). Did you introduce a reference cycle?", stacklevel=4
    )
    try:
        import objgraph
    except ImportError:
        warnings.warn("install `objgraph` to draw the objects that refer to the leaked tensors", stacklevel=4)
        return
    for item in leaked[:limit]:
        objgraph.show_backrefs([item], max_depth=10)


@contextlib.contextmanager
def TemporaryFileName(*args: Any, **kwargs: Any) -> Iterator[str]:
    """Yield the name of an empty file, removed at the end; the arguments are those of `tempfile.NamedTemporaryFile`."""
    with tempfile.NamedTemporaryFile(*args, **kwargs) as file:
        yield file.name


@contextlib.contextmanager
def TemporaryDirectoryName(suffix: str | None = None) -> Iterator[str]:
    with tempfile.TemporaryDirectory(suffix=suffix) as directory:
        yield directory


@contextlib.contextmanager
def captured_output() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Capture the text that the block prints through sys.stdout and sys.stderr."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        yield out, err
