"""Free ports, and retries for when another process takes one first."""

import functools
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_testing_ext._torch.signs import error_texts
from torch_testing_ext._torch.signs.error_texts import (
    ADDRESS_IN_USE as ADDRESS_IN_USE,
    CONNECT_TIMEOUT as CONNECT_TIMEOUT,
)

TRIES = 10

# A generator of its own, so that waiting does not change the test's random numbers.
_jitter = random.Random()
# The sockets of this process.
_leases: set[socket.socket] = set()


def find_free_port() -> int:
    """Return a port that is free now. Nothing keeps it free: pair this with `retry_on_connect_failures`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def leased_port() -> Iterator[int]:
    """A port that no other process is given while the `with` lasts, but that a server may listen on.

    A socket that is bound and does not listen keeps it: the system gives the port to nobody who asks for any port, and
    lets a server bind it that sets SO_REUSEADDR, as all of torch's do.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as lease:
        lease.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        lease.bind(("", 0))
        _leases.add(lease)
        try:
            yield lease.getsockname()[1]
        finally:
            _leases.discard(lease)


def forget_leases() -> None:
    """In a forked child that lives longer than the leases of its parent: leave them to it."""
    for lease in _leases:
        lease.close()
    _leases.clear()


def retry_on_connect_failures(
    func: Callable[..., Any] | None = None, connect_errors: str | Iterable[str] = (ADDRESS_IN_USE,)
) -> Any:
    """Retry a test, up to 10 runs in all, after a RuntimeError whose message contains one of the texts."""
    if func is None:
        return functools.partial(retry_on_connect_failures, connect_errors=connect_errors)
    texts = (connect_errors,) if isinstance(connect_errors, str) else tuple(connect_errors)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for left in reversed(range(TRIES)):
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if not error_texts.has_one_of(error, texts):
                    raise
                if not left:
                    raise RuntimeError(f"Failing after {TRIES} retries with error: {error}") from error
            time.sleep(_jitter.random())
        raise AssertionError

    return wrapper
