"""Bodies of ranks that show an aspect of their test: an address, a check, a warning, a process that is left."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist


def has_an_address(rank):
    """It meets its peers by the variables of its process."""
    dist.init_process_group("gloo", init_method="env://")
    dist.barrier()


def reduces_nan(rank):
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="env://")
    dist.all_reduce(torch.full((1,), float("nan")))


def warns(rank):
    warnings.warn(f"warned in rank {rank}", stacklevel=1)


def leaves_a_process(rank):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


def leaves_a_fork(rank):
    """Python does not see this fork, so that no rank is refused it."""
    if ctypes.CDLL(None).fork() == 0:
        signal.pause()


def is_alone(rank):
    """It has a machine to itself, as far as it can tell."""
    names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    place = tuple(os.environ.get(name) for name in names), socket.gethostname(), tempfile.gettempdir().split(os.sep)[-2]
    assert place == ((str(rank), "0", "1"), f"node{rank}", f"node{rank}"), f"is not alone: {place}"


def fails(rank):
    raise AssertionError("it fails")


_OF_ASPECTS = (has_an_address, reduces_nan, warns, leaves_a_process, leaves_a_fork, is_alone, fails)
BODIES = {body.__name__: body for body in _OF_ASPECTS}
