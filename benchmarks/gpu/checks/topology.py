"""NVML and CUDA agree about the devices: UUIDs, memory, compute capability."""

ORDER = 25
LIMIT = 10


def check(c):
    import torch

    from torch_testing_ext._machine.nvml import open_nvml
    from torch_testing_ext._process.questions import NoAnswer

    try:
        nvml = open_nvml()
    except NoAnswer as error:
        c.skip(str(error))
    gpus = {gpu.uuid.removeprefix("GPU-"): gpu for gpu in nvml.gpus()}
    usage = nvml.usage()
    nvml.close()
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        gpu = gpus.get(str(found.uuid))
        if not c.expect(gpu is not None, f"NVML knows CUDA's device {number} by its UUID", [str(found.uuid), *gpus]):
            continue
        c.note(f"device {number}: {gpu}")
        close = abs(gpu.memory - found.total_memory) < 0.05 * gpu.memory
        c.expect(close, f"the memory of device {number} is the same", (gpu.memory, found.total_memory))
        capability = (found.major, found.minor)
        c.expect(gpu.capability == capability, f"its compute capability is the same: {number}", gpu.capability)
        c.expect(usage[gpu.uuid].memory is not None, f"NVML says what is in use of device {number}", usage)
