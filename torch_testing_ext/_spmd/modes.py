"""The choices of a user, and the error that names the problem, the line and the remedy."""

import itertools
import os
import traceback
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

DataParallelStyle = Literal["replicate", "fully_shard", "default"]

NO_GRAPH = "Compile the model with torch.compile: a pass of its backend sees the graphs of forward and backward."
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Where torch's errors of DTensors and of the group come from.
_DISTRIBUTED = os.path.join(_TORCH, "distributed", ""), os.path.join(os.path.dirname(__file__), "resting_tensor.py")


class SPMDError(ValueError):
    """The step, model or optimizer cannot be made data parallel.

    `what` is the problem, `where` the line of user code that caused it ("file:line, in function: code"), and `remedy`
    says how to fix it.
    """

    def __init__(self, what: str, *, remedy: str, where: str | None = None) -> None:
        self.what, self.remedy, self.where = what, remedy, where
        super().__init__("\n".join(filter(None, [what, where and f"  at {where}", f"  {remedy}"])))


def _is_of_user(entry: traceback.FrameSummary) -> bool:
    """Whether a line is neither of torch nor of this package."""
    return not entry.filename.startswith((_TORCH, _PACKAGE, "<"))


def _innermost(entries: Sequence[traceback.FrameSummary]) -> str | None:
    for entry in filter(_is_of_user, reversed(entries)):
        return f"{entry.filename}:{entry.lineno}, in {entry.name}: {entry.line}"
    return None


def current_line() -> str | None:
    """The innermost line of user code that runs now."""
    return _innermost(traceback.extract_stack())


def line_of(error: BaseException) -> str | None:
    """The innermost line of user code in the traceback of an error."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def _files_of(error: BaseException) -> list[str]:
    """The files of the frames between the innermost line of user code and the origin of an error."""
    entries = reversed(traceback.extract_tb(error.__traceback__))
    return [entry.filename for entry in itertools.takewhile(lambda entry: not _is_of_user(entry), entries)]


def explained(error: BaseException) -> BaseException:
    """An error of a step, with the line of the user if the compiler or torch's distributed code has raised it."""
    if isinstance(error, SPMDError):
        return error if error.where else SPMDError(error.what, where=line_of(error), remedy=error.remedy)
    if not any(file.startswith(_DISTRIBUTED) for file in _files_of(error)):
        return error
    text = (str(error) or type(error).__name__).splitlines()[0][:300]
    return SPMDError(
        f"torch.distributed raised {type(error).__name__}: {text}",
        where=line_of(error),
        remedy="In a step, parameters and gradients are whole and plain, and states of optimizers are DTensors. "
        "Take full_tensor() of a DTensor that meets a plain tensor.",
    )


class ParallelMode:
    """A way to parallelize a step."""


class DataParallel(ParallelMode):
    """Data parallelism: every rank takes its own batch, and the update applies the mean gradient over ranks.

    parallel_style: "replicate" keeps whole parameters on every rank (like DDP), "fully_shard" shards parameters between
        calls, gradients and optimizer states along dim 0. "default" keeps the layout of parameters that an earlier
        compiled step distributed, and replicates them otherwise.
    input_batch_dim: the batch dimension of the inputs, as in PyTorch's compiler. This one need not know it.
    bucket_mb: the size limit of a bucket of gradients, in MiB. None chooses it by their total.
    """

    def __init__(
        self,
        parallel_style: DataParallelStyle = "replicate",
        *,
        input_batch_dim: int = 0,
        bucket_mb: float | None = None,
        custom_passes: Any = None,
    ) -> None:
        if parallel_style not in get_args(DataParallelStyle):
            choices = ", ".join(map(repr, get_args(DataParallelStyle)))
            raise SPMDError(f"Unknown parallel_style {parallel_style!r}.", remedy=f"Use one of {choices}.")
        if not isinstance(input_batch_dim, int) or isinstance(input_batch_dim, bool) or input_batch_dim < 0:
            raise SPMDError(f"input_batch_dim is {input_batch_dim!r}.", remedy="Pass a dimension, counted from 0.")
        if bucket_mb is not None and bucket_mb <= 0:
            raise SPMDError(f"bucket_mb is {bucket_mb}.", remedy="Pass a positive size in MiB.")
        if custom_passes is not None:
            raise SPMDError("Steps are not recorded, so there is no graph for custom_passes.", remedy=NO_GRAPH)
        self.parallel_style = parallel_style
        self.bucket_bytes = None if bucket_mb is None else int(bucket_mb * 2**20)


class Override:
    """A name of PyTorch's compiler, which replaced modules while it recorded a step. This one records nothing."""

    def __init_subclass__(cls) -> None:
        raise SPMDError("Steps are not recorded, so an Override has nothing to replace.", remedy=NO_GRAPH)
