"""The works that operations return."""

from __future__ import annotations

from typing import Any

import torch


def work_of(result: Any) -> Any:
    """The work that an operation has returned, the very object that its caller gets; None if there is none.

    `Work.unbox`: 2.11 to 2.15.
    """
    last = result[-1] if isinstance(result, tuple) else result
    return torch._C._distributed_c10d.Work.unbox(last) if isinstance(last, torch.ScriptObject) else None


def with_complete_work(result: Any, outputs: list[torch.Tensor]) -> Any:
    """The result of an operation, with work that is complete and has a future with the outputs.

    That of a fake group has a future with nothing, which DDP refuses. `_create_work_from_future`: 2.11 to 2.15.
    """
    future: Any = torch.futures.Future()
    future.set_result(outputs)
    module: Any = torch._C._distributed_c10d
    boxed = module._create_work_from_future(future).boxed()
    return (*result[:-1], boxed) if isinstance(result, tuple) else boxed
