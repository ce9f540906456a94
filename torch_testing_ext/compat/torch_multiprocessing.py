"""Stand-ins for the functions of `torch.multiprocessing` that start the processes of a test."""

from __future__ import annotations

import functools
import pickle
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch_testing_ext._testing.bases.spawned_functions import spawn

# Keeps these frames out of the tracebacks of unittest and of pytest.
__unittest = True
__tracebackhide__ = True


def mp_spawn(
    fn: Callable[..., object], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, **how: object
) -> None:
    """Call `fn(rank, *args)` in ranks, as `torch.multiprocessing.spawn` does. Its start method is ignored."""
    if not join:
        raise ValueError("mp_spawn waits for its ranks: join=False is not possible")
    spawn(fn, nprocs, *args)


class Pool:
    """A `multiprocessing.Pool` whose processes are ranks: rank i runs call i of `starmap`.

        with Pool(2) as pool:
            results = pool.starmap(work, [(0,), (1,)])

    Each `starmap` starts fresh ranks with a process group, and calls `initializer(*initargs)` in them first.
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
        """Call `func(*arguments)` for each element, each in a rank of its own, and return the results."""
        calls = [tuple(arguments) for arguments in iterable]
        if len(calls) != self.size:
            raise ValueError(f"starmap has {len(calls)} calls for {self.size} ranks: each rank runs one of them")
        with tempfile.TemporaryDirectory() as folder:
            spawn(_call_for_result, self.size, func, calls, self._initializer, folder, backend=self._backend)
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
