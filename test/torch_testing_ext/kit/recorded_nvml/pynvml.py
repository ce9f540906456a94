"""A stand-in for pynvml, of the package nvidia-ml-py: its functions, answered from a file that a test writes.

The file is read for every call, so that a test can change what the driver says. Its fields are those of
`kit.nvml.Machine`.
"""

import json
import os
import time
from types import SimpleNamespace

NVML_P2P_STATUS_OK = 0
NVML_ERROR_NOT_SUPPORTED = 3


class NVMLError(Exception):
    pass


def _machine():
    with open(os.environ["RECORDED_NVML"]) as file:
        return json.load(file)


def _answers(function):
    """A call that fails, or never returns, if the machine says so."""

    def call(*arguments):
        machine = _machine()
        if function.__name__ == machine["hangs_in"]:
            time.sleep(3600)
        if function.__name__ in machine["fails_in"]:
            raise NVMLError(machine["fails_in"][function.__name__])
        return function(machine, *arguments)

    return call


def _device(machine, handle):
    """A handle has the number of a GPU."""
    device = machine["gpus"][handle[0]]
    if device.get("trouble"):
        raise NVMLError(device["trouble"])
    return device


@_answers
def nvmlInit(machine):
    pass


@_answers
def nvmlDeviceGetCount(machine):
    return len(machine["gpus"])


@_answers
def nvmlDeviceGetHandleByIndex(machine, index):
    return (index,)


@_answers
def nvmlDeviceGetUUID(machine, handle):
    return _device(machine, handle)["uuid"]


@_answers
def nvmlDeviceGetName(machine, handle):
    return _device(machine, handle)["name"]


@_answers
def nvmlDeviceGetMemoryInfo(machine, handle):
    device = _device(machine, handle)
    return SimpleNamespace(total=device["memory"], used=device["used"], free=device["memory"] - device["used"])


@_answers
def nvmlDeviceGetCudaComputeCapability(machine, handle):
    return tuple(_device(machine, handle)["capability"])


@_answers
def nvmlDeviceGetComputeMode(machine, handle):
    return _device(machine, handle)["compute_mode"]


@_answers
def nvmlDeviceGetComputeRunningProcesses(machine, handle):
    return [SimpleNamespace(**process) for process in _device(machine, handle)["processes"]]


@_answers
def nvmlDeviceGetGraphicsRunningProcesses(machine, handle):
    return []


@_answers
def nvmlDeviceGetP2PStatus(machine, one, other, capability):
    pair = sorted((one[0], other[0]))
    return NVML_P2P_STATUS_OK if capability == 2 and pair in machine["nvlinks"] else 5
