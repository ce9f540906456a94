"""Free ports, and trying again when somebody else was faster to take one."""

from __future__ import annotations

import functools
import random
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

ADDRESS_IN_USE = "Address already in use"
CONNECT_TIMEOUT = "connect() timed out."
TRIES = 10

# Of its own, so that waiting leaves the test's random numbers as they were.
_jitter = random.Random()


def find_free_port() -> int:
    """A port that was free just now. Nothing keeps it free: pair this with `retry_on_connect_failures`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def retry_on_connect_failures(
    func: Callable[..., Any] | None = None, connect_errors: str | Iterable[str] = (ADDRESS_IN_USE,)
) -> Any:
    """Run the test again, up to 10 times in all, after a RuntimeError that holds one of the texts."""
    if func is None:
        return functools.partial(retry_on_connect_failures, connect_errors=connect_errors)
    texts = (connect_errors,) if isinstance(connect_errors, str) else tuple(connect_errors)

    def is_meant(error: RuntimeError) -> bool:
        # A TCPStore on libuv says "address already in use", the one before it began with a capital.
        return any(text.lower() in str(error).lower() for text in texts)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for _ in range(TRIES - 1):
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if not is_meant(error):
                    raise
            time.sleep(_jitter.random())
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not is_meant(error):
                raise
            raise RuntimeError(f"Failing after {TRIES} retries with error: {error}") from error

    return wrapper
