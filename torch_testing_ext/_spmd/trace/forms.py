"""The forms in which a step is traced, one after the other until one succeeds.

A step that cannot take symbols for batch sizes is traced with numbers; an optimizer that branches on values that it
keeps in tensors is traced in its capturable form, or with constant learning rates.
"""

from __future__ import annotations

from torch_testing_ext._torch import data_dependent_errors

from ..errors import SPMDError, user_line_of
from .tracing import Trace, TracedStep, TraceRequest


def trace_step(request: TraceRequest, fixed_sizes: bool = False) -> TracedStep:
    """Trace the step as requested. If an optimizer branches on values that it keeps in tensors, try other forms of it.

    The capturable form of torch's optimizers has no such branches; alternatively, learning rates become constants.
    A step that fails with symbols for batch sizes is traced with numbers, for these sizes only; also on request.
    """
    request.fixed_sizes = fixed_sizes
    try:
        return _trace_some_form(request)
    except SPMDError:
        raise
    except Exception:
        request.fixed_sizes = True
        try:
            return _trace_some_form(request)
        except RuntimeError as error:
            if "is not tracked with proxy" not in str(error):
                raise
            raise SPMDError(
                "The step uses a tensor that a trace cannot follow, because torch made it where no trace sees it (a "
                "GradScaler, a C++ extension).",
                remedy="Keep that part outside of the step.",
                where=user_line_of(error),
            ) from error


def _trace_some_form(request: TraceRequest) -> TracedStep:
    requested = request.compiling, request.constant_lrs
    first: Exception | None = None
    for compiling, constant_lrs in dict.fromkeys([requested, (True, False), (False, True), (True, True)]):
        request.compiling, request.constant_lrs = compiling, constant_lrs
        try:
            return Trace(request).run()
        except data_dependent_errors() as error:
            first = first or error
    request.compiling, request.constant_lrs = requested
    assert first is not None
    raise _control_flow_error(first) from first


def _control_flow_error(error: Exception) -> SPMDError:
    first = str(error).strip().splitlines()[0]
    return SPMDError(
        f"The step branches on the value of a tensor (data-dependent control flow): {first}",
        remedy="Use torch.where or a mask instead of if, bool() or int(); to log values, return them from the step.",
        where=user_line_of(error),
    )
