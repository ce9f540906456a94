"""The forms in which a step is traced, one after the other until one succeeds.

A step that cannot take symbols for batch sizes is traced with numbers; an optimizer that branches on values that it
keeps in tensors is traced in its capturable form, or with constant learning rates.
"""

from __future__ import annotations

import traceback

import torch

from torch_testing_ext._torch.spmd import data_dependent_errors

from ..spmd_errors import SPMDError, user_line_of
from .refusals import NumberAsText
from .tracing import Trace, TracedStep, TraceRequest

_DISTRIBUTIONS = f"{torch.__path__[0]}/distributions/"


def trace_step(request: TraceRequest, fixed_sizes: bool = False) -> TracedStep:
    """Trace the step as requested. If an optimizer branches on values that it keeps in tensors, try other forms of it.

    The capturable form of torch's optimizers has no such branches; alternatively, learning rates become constants.
    A step that fails with symbols for batch sizes is traced with numbers, for these sizes only; also on request.
    """
    request.fixed_sizes, request.raised_after_changes = fixed_sizes, False
    try:
        return _trace_some_form(request)
    except SPMDError:
        raise
    except Exception:
        request.fixed_sizes = True
        try:
            return _trace_some_form(request)
        except Exception as error:
            if request.raised_after_changes:
                raise _exception_error(error) from error
            if "FakeTensor" in str(error):
                raise _untraceable_error(error) from error
            if "is not tracked with proxy" not in str(error):
                raise
            raise SPMDError(
                "The step uses a tensor that a trace cannot follow, because torch made it where no trace sees it (a "
                "GradScaler, a C++ extension).",
                remedy="Keep that part outside of the step.",
                where=user_line_of(error),
            ) from error


def _untraceable_error(error: Exception) -> SPMDError:
    return SPMDError(
        f"The step does something that a trace, whose tensors have no values, cannot follow: {error}",
        remedy="Keep that part outside of the step; use a mask instead of lengths, indices or sizes from a tensor.",
        where=user_line_of(error),
    )


def _exception_error(error: Exception) -> SPMDError:
    text = "".join(traceback.format_exception_only(error)).strip()
    return SPMDError(
        f"The step raises an exception after it has changed the model or an input ({text}). The compiled step would "
        "leave them as they were.",
        remedy="Raise before the first backward() or write, or return a flag and raise outside of the step.",
        where=user_line_of(error),
    )


def _trace_some_form(request: TraceRequest) -> TracedStep:
    requested = request.compiling, request.constant_lrs
    first: Exception | None = None
    text: NumberAsText | None = None  # perhaps only of a learning rate
    for compiling, constant_lrs in dict.fromkeys([requested, (True, False), (False, True), (True, True)]):
        request.compiling, request.constant_lrs = compiling, constant_lrs
        try:
            return Trace(request).run()
        except data_dependent_errors() as error:
            first = first or error
        except NumberAsText as error:
            text = text or error
            if constant_lrs or not _has_number_lr(request):
                break
    request.compiling, request.constant_lrs = requested
    if text is not None:
        raise text
    assert first is not None
    raise _control_flow_error(first) from first


def _is_within(error: BaseException, folder: str) -> bool:
    return any(entry.filename.startswith(folder) for entry in traceback.extract_tb(error.__traceback__))


def _has_number_lr(request: TraceRequest) -> bool:
    groups = [group for optimizer in request.state.optimizers for group in optimizer.param_groups]
    return any(isinstance(group.get("lr"), float) for group in groups)


def _control_flow_error(error: Exception) -> SPMDError:
    first = str(error).strip().splitlines()[0]
    return SPMDError(
        f"The step branches on the value of a tensor (data-dependent control flow): {first}",
        remedy="Pass validate_args=False to the distribution."
        if _is_within(error, _DISTRIBUTIONS)
        else "Use torch.where or a mask instead of if, bool() or int(); to log values, return them from the step.",
        where=user_line_of(error),
    )
