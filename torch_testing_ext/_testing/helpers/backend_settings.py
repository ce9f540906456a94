"""Settings of the backends of operations, for the time of a test: precision of float32, and preferred libraries."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_testing_ext._machine import accelerators
from torch_testing_ext._torch.devices import cuda_state

from .contexts import within

Function = Callable[..., Any]
# Untyped in torch.
_backends: Any = torch.backends


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


class _SharedSetting:
    """A setting of the process. Of threads that are inside at once, the first one sets it, and the last one resets."""

    def __init__(self, setting: Callable[[], contextlib.AbstractContextManager[None]]):
        self._setting = setting
        self._lock = threading.Lock()
        self._inside = 0
        self._entered = contextlib.ExitStack()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._entered.enter_context(self._setting())
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._entered.close()


_FULL_FLOAT32 = _SharedSetting(functools.partial(_tf32, False))


@contextlib.contextmanager
def tf32_off() -> Iterator[None]:
    """Compute in full float32."""
    with _FULL_FLOAT32.entered():
        yield


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
