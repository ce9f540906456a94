"""The texts of errors by which torch says why something has failed."""

import re
from collections.abc import Sequence

# of 2.11 to 2.15.

# The process at the other end of a collective or a store has gone.
LOST_PEER = re.compile(
    # gloo's pairs and TCPStore's sockets, with the system's words for the errno
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by peer|connection lost"
    # NCCL, as ProcessGroupNCCL reports it
    r"|remote process exited|NCCL.*(remote error|communicator was aborted)"
    # TCPStore, and the exchange of NCCL's unique id over it
    r"|recvValue failed|sendBytes failed|socket (timeout|error)|failed to recv",
    re.IGNORECASE,
)
# A wait for other ranks was given up, by gloo, TCPStore or HashStore ("Wait timeout").
GAVE_UP = re.compile(r"timed out waiting|timed out after .* waiting|wait timeout", re.IGNORECASE)
# A store or a backend could not listen.
PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
# A TCPStore on libuv writes "address already in use", the older one this.
ADDRESS_IN_USE = "Address already in use"
CONNECT_TIMEOUT = "connect() timed out."
# The lines below the first one say why a rank did not come to a barrier.
_SEVERAL_LINES = "monitoredBarrier"
# The place in a C++ source where an error was raised.
_CPP_PLACE = re.compile(r"\[[^\]\s]+\.(cc|cpp|h|hpp):\d+\] ?")


def lines_that_say_why(text: str) -> str:
    """The part of an error's text that says why: its first line, unless the others do."""
    first = text.partition("\n")[0]
    return text if _SEVERAL_LINES in first else first


def without_cpp_place(text: str) -> str:
    """A text without the places in C++ sources."""
    return _CPP_PLACE.sub("", text)


def has_one_of(error: BaseException, texts: Sequence[str]) -> bool:
    """Whether an error has one of these texts, in capitals or not."""
    return any(text.lower() in str(error).lower() for text in texts)


def is_of_ambiguous_tensor(error: BaseException) -> bool:
    """Whether an error says that a tensor of several values is neither true nor false."""
    return "Boolean value of Tensor" in str(error)


# Errors of DTensor for operations, or arguments of them, that it does not support.
_UNSUPPORTED = ("does not have a sharding strategy registered", "got mixed torch.Tensor and DTensor")


def is_of_unsupported_dtensor(error: BaseException) -> bool:
    """Whether an error says that DTensor does not support an operation, or its arguments."""
    return any(text in str(error) for text in _UNSUPPORTED)


def is_of_missing_triton(error: BaseException) -> bool:
    """Whether an error says that Triton is not installed."""
    return "triton" in str(error).lower()


# What to do about errors that newcomers meet first, by their text.
_ADVICE = (
    (
        re.compile("initialize the default process group twice"),
        "The test has a process group before it begins, as dist_env makes one: leave out init_process_group.",
    ),
    (
        re.compile("Default process group has not been initialized"),
        "Nothing has made a process group: ask for dist_env, pass backend='gloo' to spawn, or call init_process_group.",
    ),
    (
        re.compile("not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|'_cuda_setDevice'"),
        "The ranks are on the CPU: use dist_env.device, or have the test skip without GPUs (devices=2 in its mark).",
    ),
)


def advice_on(text: str) -> str:
    """The advice on an error with this text; "" if there is none."""
    return next((advice for pattern, advice in _ADVICE if pattern.search(text)), "")
