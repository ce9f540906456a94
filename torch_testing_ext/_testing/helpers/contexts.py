"""Context managers: settings, files, environment, precision and libraries of backends."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import io
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from torch_testing_ext._machine import accelerators
from torch_testing_ext._torch.devices import cuda_state

# --------------------------------------------------------------------------------------------------------------------
# Context managers for settings and files; each restores the previous state at its end.

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


@contextlib.contextmanager
def changed_environment(**values: str | None) -> Iterator[None]:
    """Set variables (None: unset) for the length of a `with`, then restore them."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# --------------------------------------------------------------------------------------------------------------------
# Settings of the backends of operations, for the time of a test: precision of float32, and preferred libraries.

Function = Callable[..., Any]
# Untyped in torch.
_backends: Any = torch.backends


# -- the precision of float32


def _precision_settings() -> tuple[Any, ...]:
    """The objects with an `fp32_precision`."""
    cuda, cudnn, mkldnn = _backends.cuda, _backends.cudnn, _backends.mkldnn
    return cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn


def _legacy_precision() -> str | None:
    """The older setting for matrix products; None where the newer ones contradict it, as torch then refuses."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextlib.contextmanager
def _precision_kept() -> Iterator[None]:
    legacy = _legacy_precision()
    before = [setting.fp32_precision for setting in _precision_settings()]
    try:
        yield
    finally:
        # First the older setting: setting it also sets newer ones.
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)
        for setting, value in zip(_precision_settings(), before, strict=True):
            setting.fp32_precision = value


def recover_orig_fp32_precision(fn: Function) -> Function:
    """Restore all settings of the precision of float32 after the test."""
    return within(_precision_kept)(fn)


@contextlib.contextmanager
def _ieee_products() -> Iterator[None]:
    with _precision_kept():
        _backends.cuda.matmul.fp32_precision = "ieee"
        _backends.mkldnn.matmul.fp32_precision = "ieee"
        yield


def with_ieee_matmul_precision(f: Function) -> Function:
    """Run a test whose matrix products are exact in float32."""
    return within(_ieee_products)(f)


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    with _precision_kept():
        _backends.cuda.matmul.allow_tf32 = allowed
        with _backends.cudnn.flags(enabled=None, benchmark=None, deterministic=None, allow_tf32=allowed):
            yield


_lock, _inside, _shared = threading.Lock(), 0, contextlib.ExitStack()


@contextlib.contextmanager
def tf32_off() -> Iterator[None]:
    """Compute in full float32. Of threads that are inside at once, the first one sets that, and the last one resets."""
    global _inside
    with _lock:
        if _inside == 0:
            _shared.enter_context(_tf32(False))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _shared.close()


@contextlib.contextmanager
def tf32_on(self: Any, tf32_precision: float = 1e-5) -> Iterator[None]:
    """Allow TF32; meanwhile, the test `self` compares with this precision."""
    before = self.precision
    try:
        self.precision = tf32_precision
        with _tf32(True):
            yield
    finally:
        self.precision = before


@contextlib.contextmanager
def tf32_enabled() -> Iterator[None]:
    with _tf32(True):
        yield


def with_tf32_off(f: Function) -> Function:
    return within(tf32_off)(f)


def tf32_on_and_off(tf32_precision: float = 1e-5, *, only_if: bool = True) -> Callable[[Function], Function]:
    """Run a test without TF32 and with it, where it makes a difference; else once.

    It does on a CUDA device that has it. If the test has the parameters `device` and `dtype`, they must be one of CUDA,
    and float32 or complex64.
    """

    def decorate(f: Function) -> Function:
        """Run a test without TF32, and again with it."""
        names = tuple(inspect.signature(f).parameters)

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            given = {**kwargs, **dict(zip(names, args, strict=False))}
            if not (only_if and _may_use_tf32(given) and accelerators.cuda_properties().get("has_tf32")):
                f(*args, **kwargs)
                return
            with tf32_off():
                f(*args, **kwargs)
            with tf32_on(given["self"], tf32_precision):
                f(*args, **kwargs)

        return wrapper

    return decorate


def _may_use_tf32(given: dict[str, Any]) -> bool:
    on_cuda = "device" not in given or torch.device(given["device"]).type == "cuda"
    return on_cuda and ("dtype" not in given or given["dtype"] in (torch.float32, torch.complex64))


# -- libraries


@contextlib.contextmanager
def blas_library_context(backend: Any) -> Iterator[None]:
    """Prefer a library for linear algebra on CUDA."""
    with _choice_kept("preferred_blas_library"):
        _backends.cuda.preferred_blas_library(backend)
        yield


@contextlib.contextmanager
def _choice_kept(preferred: str) -> Iterator[None]:
    choose = getattr(_backends.cuda, preferred)
    before = choose()
    try:
        yield
    finally:
        choose(before)


@contextlib.contextmanager
def _blas_kept() -> Iterator[None]:
    try:
        with _choice_kept("preferred_blas_library"):
            yield
    finally:
        if _backends.cuda.is_built():
            cuda_state.forget_blas_workspaces()


# Decorators: restore the preferred library after the test, which may change it.
setLinalgBackendsToDefaultFinally = within(lambda: _choice_kept("preferred_linalg_library"))
setBlasBackendsToDefaultFinally = within(_blas_kept)
setSdpaBackendsToDefaultFinally = within(lambda: _choice_kept("preferred_rocm_fa_library"))
