"""Stand-ins for the functions and classes by which projects start the ranks of their tests: the import alone changes.

Each has the name and the arguments that it has there, and runs its function in fresh ranks, by `spawn`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import tempfile
import types
import unittest
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch_testing_ext._machine import accelerators
from torch_testing_ext._process.launcher_variables import OF_ONE_RANK, TORCHRUN

from .scripts import run_script
from .spawning import spawn

__unittest = True
# Does the same in pytest.
__tracebackhide__ = True


def _call(rank: int, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    result = function(*args, **kwargs)
    if asyncio.iscoroutine(result):
        asyncio.run(result)


# -- accelerate


def debug_launcher(function: Callable[..., object], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Call `function(*args)` in ranks on the CPU, which have a group of gloo; for accelerate's function."""
    spawn(_call_on_cpu, num_processes, function, args, backend="gloo")


def _call_on_cpu(rank: int, function: Callable[..., object], args: Sequence[Any]) -> None:
    # accelerate sets none of these: they would make one rank a launch.
    for name in (*OF_ONE_RANK, TORCHRUN.local_world_size):
        os.environ.pop(name, None)
    os.environ.update(ACCELERATE_USE_CPU="yes", ACCELERATE_MIXED_PRECISION="no", FORK_LAUNCHED="1")
    function(*args)


def execute_subprocess_async(
    cmd: Sequence[Any], env: dict[str, str] | None = None, stdin: Any = None, timeout: float = 180, **shown: bool
) -> Any:
    """Run the script of a command of `accelerate launch` in ranks, if its only options are the number of processes and
    how often to look at them; any other command as accelerate does. For accelerate's function.
    """
    launched = _script_of([str(word) for word in cmd])
    if launched is None:
        from accelerate.test_utils import testing

        return testing.execute_subprocess_async(list(cmd), env, stdin, timeout, **shown)
    ranks, script, args = launched
    run = run_script(script, *args, ranks=ranks, env=env, timeout=timeout)
    lines: list[str] = []
    for output in run.outputs:
        lines += output.splitlines()
    return types.SimpleNamespace(returncode=0, stdout=lines, stderr=[])


def _script_of(words: Sequence[str]) -> tuple[int, str, list[str]] | None:
    """The number of ranks, the script and its arguments in a command of `accelerate launch`; None for any other one."""
    if list(words[:2]) != ["accelerate", "launch"]:
        return None
    options = {}
    rest = list(words[2:])
    while rest and rest[0].startswith("--"):
        name, equals, value = rest.pop(0).removeprefix("--").partition("=")
        if not equals or name in options or name not in ("num_processes", "monitor_interval"):
            return None
        options[name] = value
    script, *args = rest or [""]
    ranks = int(options.get("num_processes", 0)) if script.endswith(".py") else 0
    return (ranks, script, args) if ranks >= 2 else None


# -- torch


def mp_spawn(
    fn: Callable[..., object], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, **how: object
) -> None:
    """Call `fn(rank, *args)` in ranks; for torch.multiprocessing.spawn. How processes would start does not matter."""
    if not join:
        raise ValueError("mp_spawn waits for its ranks: join=False is not possible")
    spawn(fn, nprocs, *args)


def elastic_launch(config: Any, entrypoint: Callable[..., Any]) -> Callable[..., dict[int, Any]]:
    """Return a function that calls `entrypoint` in ranks, and has their results; for torch.distributed.launcher's."""

    def launched(*args: Any) -> dict[int, Any]:
        with Pool(config.max_nodes * config.nproc_per_node, backend=None) as pool:
            return dict(enumerate(pool.starmap(entrypoint, [args] * pool.size)))

    return launched


# -- torchsnapshot


def run_with_pet(nproc: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated test, a function or a coroutine function, in ranks; for torchsnapshot's decorator."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def launched(*args: Any, **kwargs: Any) -> None:
            spawn(_call, nproc, function, args, kwargs)

        # Not functools.wraps: the copied marks of a coroutine function would have a plugin await the result.
        functools.update_wrapper(launched, function)
        return launched

    return decorate


run_with_pet_async = run_with_pet


# -- torchrec


class MultiProcessTestBase(unittest.TestCase):
    """A base with the methods of torchrec's: a test calls one of them with a function and keyword arguments for it."""

    def _run_multi_process_test(self, *, callable: Callable[..., object], world_size: int = 2, **kwargs: Any) -> None:
        """Call `callable(rank=, world_size=, **kwargs)` in each rank."""
        spawn(_call_by_keywords, world_size, callable, world_size, [kwargs] * world_size)

    def _run_multi_process_test_per_rank(
        self, *, callable: Callable[..., object], world_size: int, kwargs_per_rank: list[dict[str, Any]]
    ) -> None:
        """Do as `_run_multi_process_test`, with keyword arguments for each rank."""
        spawn(_call_by_keywords, world_size, callable, world_size, kwargs_per_rank)


def _call_by_keywords(
    rank: int, function: Callable[..., object], world_size: int, kwargs_per_rank: list[dict[str, Any]]
) -> None:
    kwargs = {**kwargs_per_rank[rank], "rank": rank, "world_size": world_size}
    function(**kwargs)


# -- fairscale


def spawn_for_all_world_sizes(
    test_func: Callable[..., object],
    world_sizes: Iterable[int] | None = None,
    args: Sequence[Any] = (),
    deterministic: bool = False,
) -> None:
    """Call `test_func(rank, world_size, file, other_file, *args)` in ranks, for each world size; for fairscale's.

    The files do not exist yet; fairscale's `dist_init` has the ranks meet there. By default, there are as many ranks as
    accelerators: 1, 2, 4 and 8 of them, as far as there are so many.
    """
    if world_sizes is None:
        world_sizes = [size for size in (1, 2, 4, 8) if size <= accelerators.device_count()]
        if not world_sizes:
            raise unittest.SkipTest("by default, it needs accelerators; without any, fairscale's calls nothing")
    for size in world_sizes:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder, "group"))
            other_file = str(Path(folder, "rpc"))
            spawn(_call_seeded, size, test_func, deterministic, size, file, other_file, *args)


def _call_seeded(rank: int, function: Callable[..., object], deterministic: bool, *args: Any) -> None:
    if deterministic:
        import torch

        torch.backends.cudnn.deterministic = True
        torch.manual_seed(1357)
    function(rank, *args)


# -- multiprocessing


class Pool:
    """A stand-in for a multiprocessing.Pool with a process for each rank: call i of `starmap` runs in rank i.

    Each `starmap` has fresh ranks, which have a process group. `initializer(*initargs)` is called in each before.
    """

    def __init__(
        self,
        processes: int,
        initializer: Callable[..., object] | None = None,
        initargs: Sequence[Any] = (),
        backend: str | None = "gloo",
    ):
        self.size = processes
        self._backend = backend
        self._initializer = None
        if initializer is not None:
            self._initializer = functools.partial(initializer, *initargs)

    def starmap(self, func: Callable[..., Any], iterable: Iterable[Sequence[Any]], chunksize: int = 1) -> list[Any]:
        """Call `func(*arguments)` in a rank of its own for each element; return the results."""
        calls = [tuple(arguments) for arguments in iterable]
        if len(calls) != self.size:
            raise ValueError(f"starmap has {len(calls)} calls for {self.size} ranks: each rank runs one of them")
        with tempfile.TemporaryDirectory() as folder:
            spawn(_call_for_result, len(calls), func, calls, self._initializer, folder, backend=self._backend)
            files = [Path(folder, str(rank)) for rank in range(len(calls))]
            return [pickle.loads(file.read_bytes()) for file in files]

    def map(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int = 1) -> list[Any]:
        return self.starmap(func, [(argument,) for argument in iterable])

    def close(self) -> None:
        """Do nothing: no process is left."""

    join = terminate = close

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None: ...


def _call_for_result(
    rank: int,
    function: Callable[..., Any],
    calls: list[tuple[Any, ...]],
    initializer: Callable[[], object] | None,
    folder: str,
) -> None:
    if initializer is not None:
        initializer()
    result = function(*calls[rank])
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
