"""An assumption about torch as a test, which says what depends on it."""

import functools
import os
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_testing_ext._process import ends, fork_safety


class BrokenContract(AssertionError):
    """torch is no longer what we assume."""


def contract(affects: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: a test of the assumption in its docstring. `affects`: the part of the package that depends on it."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def call(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                raise BrokenContract(f"{test.__doc__} This affects {affects}. {_words(error)}") from error

        return call

    return decorate


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if isinstance(error, AssertionError) else f"{type(error).__name__}: {lines[0]}"


def in_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """Decorator: run a test in a process that is forked for it, which it may change for good."""

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
                os.write(send, (_words(error) + "\n" + traceback.format_exc()).encode()[:60_000])
            finally:
                os._exit(code)
        os.close(send)
        with os.fdopen(receive, encoding="utf-8") as pipe:
            text = pipe.read()
        code = ends.wait_for_exit(pid)
        assert not code and not text, text or f"the process of the test ended with code {code}"

    return in_parent


def world_of_one() -> None:
    """Make a default group of gloo with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def fake_world(size: int = 4) -> None:
    """Make a default group that does not communicate."""
    from torch_testing_ext._torch.groups import dataless_groups

    dataless_groups.register_fake_backend()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)


def two_groups(timeout: float = 10.0) -> list[Any]:
    """Both ends of a group of gloo with two ranks, in this process."""
    store = dist.HashStore()
    groups: list[Any] = [None, None]

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def error_of(call: Callable[[], Any]) -> Exception:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")
