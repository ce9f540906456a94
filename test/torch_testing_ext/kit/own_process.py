"""Tests in a process of their own, which they may change for good."""

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any

from torch_testing_ext._process import ends, fork_safety


def in_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """Decorator: run a test in a process that is forked for it."""

    @functools.wraps(test)
    def in_parent(*args: Any, **kwargs: Any) -> None:
        receive, send = os.pipe()
        pid = fork_safety.fork()
        if pid == 0:
            code = 1
            try:
                test(*args, **kwargs)
                code = 0
            except BaseException as error:
                os.write(send, (words_of(error) + "\n" + traceback.format_exc()).encode()[:60_000])
            finally:
                os._exit(code)
        os.close(send)
        with os.fdopen(receive, encoding="utf-8") as pipe:
            text = pipe.read()
        code = ends.wait_for_exit(pid)
        assert not code and not text, text or f"the process of the test ended with code {code}"

    return in_parent


def words_of(error: BaseException) -> str:
    """The first line of an error's message, after its type if it is no assertion."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if isinstance(error, AssertionError) else f"{type(error).__name__}: {lines[0]}"


def error_of(call: Callable[[], Any]) -> Exception:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")
