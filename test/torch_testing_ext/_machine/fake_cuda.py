"""Gives this process a torch with CUDA and devices that it does not have. Import it before our package, or after.

`torch._C` gets the functions by which torch starts CUDA: they do nothing, and the file that the variable FAKE_CUDA_USED
names gets a line from each process that calls one: its pid, and that of the process that has imported this.
"""

import importlib
import os
import sys

import torch

_importer = os.getpid()


def _entrance(name):
    def entrance(*arguments):
        with open(os.environ.get("FAKE_CUDA_USED", os.devnull), "a") as file:
            file.write(f"{name} {os.getpid()} {_importer}\n")
        return int(os.environ.get("FAKE_CUDA_COUNT", "4")) if "Count" in name else None

    return entrance


_entrances = {name: _entrance(name) for name in ("_cuda_init", "_cuda_getDeviceCount")}
for _name, _fake in _entrances.items():
    setattr(torch._C, _name, _fake)
torch._C._cuda_getCurrentRawStream = lambda device: 0
torch.cuda._cudart = object()
torch.cuda._queued_calls.clear()
torch.cuda.default_generators = tuple(torch.Generator() for _ in range(4))
torch.cuda._device_count_nvml = lambda: int(os.environ.get("FAKE_CUDA_COUNT", "4"))

accelerators = importlib.import_module("torch_testing_ext._machine.accelerators")
device_questions = importlib.import_module("torch_testing_ext._machine.device_questions")
first_use = sys.modules["torch_testing_ext._torch.devices.first_accelerator_use"]

accelerators.device_may_exist = lambda *dev: True
# What another process would answer.
device_questions.QUESTIONS["ask_devices"] = lambda: ("cuda", int(os.environ.get("FAKE_CUDA_COUNT", "4")))
device_questions.QUESTIONS["ask_cuda_properties"] = lambda: {
    "capability": (9, 0),
    "capabilities": [(9, 0)] * 4,
    "arch": "",
    "archs": [""] * 4,
    "accepts_cudnn": True,
    "cudnn_version": 91002,
    "has_magma": True,
    "has_tf32": True,
    "multicast": True,
}
device_questions.QUESTIONS["ask_facts"] = lambda: [
    {
        "name": "fake",
        "memory": 80 << 30,
        "capability": [9, 0],
        "peers": [other for other in range(4) if other != number],
    }
    for number in range(4)
]


def _note_first_use():
    first_use._replaced.clear()
    first_use.note_first_use()


if torch._C._cuda_init is _entrances["_cuda_init"]:  # our package came first, and has noted what was here before
    _note_first_use()


def begin_again():
    """Forget that CUDA has been used."""
    first_use._noted = None
    torch.cuda._initialized = False
    first_use.stop_noting()
    _note_first_use()
