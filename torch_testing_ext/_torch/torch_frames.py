"""Frames on the stack: which are torch's, and what torch is doing in them."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

# The files of decorators around deprecated functions of torch.distributed, and of its context managers.
_DECORATORS = (f"{os.sep}typing_extensions.py", f"{os.sep}contextlib.py")
_OUR_FOLDER = os.path.dirname(__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Not by an import: the rules read frames in processes that have not imported torch.
_TORCH = importlib.util.find_spec("torch")
TORCH_FOLDER = os.path.dirname((_TORCH and _TORCH.origin) or "") + os.sep
_DISTRIBUTED_FOLDER = os.path.join(TORCH_FOLDER, "distributed", "")
# The standard library, and the part of its folder that has what is installed.
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = f"-packages{os.sep}"


def is_of_torch(file: str) -> bool:
    """Whether this names one of torch's source files, or code that was not read from a file.

    So is that of its decorator for deprecated functions, such as `all_gather_into_tensor`, and of context managers.
    """
    return file.startswith((TORCH_FOLDER, "<")) or file.endswith(_DECORATORS)


def is_raised_by_distributed(frames: Iterable[FrameType]) -> bool:
    """Whether a file of torch.distributed has raised an exception. `frames`: of its traceback, the innermost last."""
    files = [frame.f_code.co_filename for frame in frames]
    innermost = next((file for file in reversed(files) if not file.startswith(_PACKAGE)), "")
    return innermost.startswith(_DISTRIBUTED_FOLDER)


@functools.cache
def is_of_program(file: str) -> bool:
    """Whether a source file is the program's: neither torch's nor Python's nor this package's, and a file at all."""
    if is_of_torch(file) or file.startswith(_PACKAGE):
        return False
    return not file.startswith(_PYTHON) or _INSTALLED in file


def program_frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """The frames of the program in a stack, innermost first."""
    frame = innermost
    while frame is not None:
        if is_of_program(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def program_places(innermost: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """The lines of the program in a stack, innermost first: file, line and function of each."""
    for frame in program_frames(innermost):
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


_DISTRIBUTED = "distributed_c10d.py"
_MODULE = os.path.join("nn", "modules", "module.py")
_OF_FSDP2 = os.path.join("_fully_shard", "_fsdp_collectives.py")
# The frames between an operation and the function of FSDP2 that calls for it, at most.
_TO_FSDP2 = 6
AROUND_CALLS = (_DISTRIBUTED, "c10d_logger.py")
# The functions of torch that tell ranks without inputs that this one goes on: 2.11 to 2.15.
FOR_JOIN = {
    "notify_join_context": os.path.join("distributed", "algorithms", "join.py"),
    "_check_global_requires_backward_grad_sync": os.path.join("nn", "parallel", "distributed.py"),
}
# torch has its compiler leave modes alone by two functions around each: 2.11 to 2.15.
AROUND_MODES = (os.path.join("torch", "_compile.py"), os.path.join("_dynamo", "eval_frame.py"))


def issuer_of(kernel: Any) -> Any:
    """The frame that issues the operation, where `kernel` is that of the kernel: its caller, or below our mode.

    None in a thread of C++ alone, such as that in which autograd runs the backward of a GPU.
    """
    frame = kernel.f_back
    if frame is not None and frame.f_back is not None and _is_ours(frame.f_back):
        frame = frame.f_back.f_back
        while frame and (_is_ours(frame) or frame.f_code.co_filename.endswith(AROUND_MODES)):
            frame = frame.f_back
    # The method that notes a send or receive stands between the operation and its caller.
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return frame


def _is_ours(frame: Any) -> bool:
    return bool(frame.f_code.co_filename.startswith(_OUR_FOLDER))


def is_called_by_distributed(issuer: Any) -> bool:
    """Whether a function of torch.distributed in Python issues the operation. Its caller then gets the work."""
    return issuer is not None and issuer.f_code.co_filename.endswith(_DISTRIBUTED)


def is_called_as(name: str, issuer: Any) -> bool:
    """Whether a function of torch.distributed of this name issues the operation, perhaps by another one."""
    while issuer is not None and issuer.f_code.co_filename.endswith(AROUND_CALLS):
        if issuer.f_code.co_name == name:
            return True
        issuer = issuer.f_back
    return False


# Stages of a pipeline vote whether all know their shapes: `PipelineStage` of 2.13 and 2.14. Other releases do not vote
# in groups that do not communicate.
VOTES = ("_warmup_forward_vote", "_warmup_backward_result")


def is_vote(issuer: Any) -> bool:
    """Whether a stage of a pipeline receives how others vote."""
    while issuer is not None and issuer.f_code.co_filename.endswith(AROUND_CALLS):
        issuer = issuer.f_back
    return issuer is not None and issuer.f_code.co_name in VOTES


# Before its first step, a pipeline opens its connections: 2.11; 2.12 to 2.14 for stages that are no PipelineStage.
_OPENS_CONNECTIONS = ("_initialize_stage", "_initialize_stages", "_warmup_p2p")
_SCHEDULES = os.path.join("pipelining", "schedules.py")


def is_opening_pipeline(frame: Any) -> bool:
    """Whether a pipeline opens its connections: it receives several messages into one buffer, which nobody reads."""
    while frame is not None:
        if frame.f_code.co_name in _OPENS_CONNECTIONS and frame.f_code.co_filename.endswith(_SCHEDULES):
            return True
        frame = frame.f_back
    return False


# Python files whose functions issue operations in C++, which waits for them at once: 2.11 to 2.15.
_WAIT_IN_CPP = (os.path.join("torch", "distributed", "utils.py"), os.path.join("nn", "parallel", "distributed.py"))


def is_awaited_in_cpp(issuer: Any) -> bool:
    """Whether DDP issues the operation when it is made, or before a forward pass: then C++ waits for it at once."""
    return issuer is not None and issuer.f_code.co_filename.endswith(_WAIT_IN_CPP)


def is_of_reducer(issuer: Any) -> bool:
    """Whether C++ issues the operation in a backward pass, as DDP's reducer does, which waits at the end of the pass.

    `_engine_run_backward`: 2.11 to 2.15.
    """
    return issuer is not None and issuer.f_code.co_name == "_engine_run_backward"


def is_of_fsdp2(issuer: Any) -> bool:
    """Whether FSDP2 issues the operation: in a stream of its own, for which it waits later. 2.11 to 2.15."""
    for _ in range(_TO_FSDP2):
        if issuer is None:
            return False
        if issuer.f_code.co_filename.endswith(_OF_FSDP2):
            return True
        issuer = issuer.f_back
    return False


def call_of_objects(frame: Any) -> str:
    """The function of torch.distributed that makes an object of what it has received."""
    return str(frame.f_code.co_name)


def is_in_method_of(owner: Any, frame: Any) -> bool:
    """Whether a method of this object runs in a stack: its frame has the object as `self`."""
    while frame is not None and frame.f_locals.get("self") is not owner:
        frame = frame.f_back
    return frame is not None


def is_in_checkpoint(frame: Any) -> bool:
    """Whether a distributed checkpoint is on the stack."""
    folder = os.path.join(_DISTRIBUTED_FOLDER, "checkpoint", "")
    while frame is not None and not frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return frame is not None


def is_for_join(issuer: Any) -> bool:
    """Whether the operation tells ranks without inputs that this one goes on.

    Nobody needs to wait for that: optimizers and DDP drop the work, or leave it to C++.
    """
    while issuer is not None and issuer.f_code.co_filename.endswith(AROUND_CALLS):
        issuer = issuer.f_back
    file = None if issuer is None else FOR_JOIN.get(issuer.f_code.co_name)
    return file is not None and issuer.f_code.co_filename.endswith(file)


# The arguments that say it, by function of `_redistribute` and `_functional_collectives`: 2.11 to 2.15.
FILES = (os.path.join("tensor", "_redistribute.py"), "_functional_collectives.py")
ARGUMENTS = {
    "redistribute_local_tensor": ("current_spec", "target_spec"),
    "all_gather_tensor": ("gather_dim",),
    "all_gather_single": ("gather_dim",),
}
FUNCTIONS_WITH_PARTS = frozenset(ARGUMENTS)


def parts_of(frame: Any) -> tuple[str, ...]:
    """Read from the function of a frame what it says about parts: placements, or a dimension. Nothing gives ()."""
    code = frame.f_code
    if code.co_name not in ARGUMENTS or not code.co_filename.endswith(FILES):
        return ()
    variables = frame.f_locals
    given = [(name, variables[name]) for name in ARGUMENTS[code.co_name] if name in variables]
    if sys.version_info < (3, 13):
        variables.clear()  # else this copy would keep tensors alive
    return tuple(str(value.placements) if name.endswith("spec") else f"{name} {value}" for name, value in given)


def modules_of(innermost: FrameType | None) -> Iterator[Any]:
    """The modules whose forward runs in a stack, innermost first. `Module._call_impl`: 2.11 to 2.15."""
    frame = innermost
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_code.co_filename.endswith(_MODULE):
            yield frame.f_locals.get("self")
        frame = frame.f_back
