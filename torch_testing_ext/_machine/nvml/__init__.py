"""Facts from NVML about the NVIDIA GPUs of this machine: memory, processes, links."""

from .client import Nvml as Nvml, may_have_nvidia_gpus as may_have_nvidia_gpus, open_nvml as open_nvml
from .gpus import ComputeMode as ComputeMode, Gpu as Gpu, GpuProcess as GpuProcess, Usage as Usage
from .gpus_of_devices import (
    gpus_by_name as gpus_by_name,
    matching_gpus as matching_gpus,
    nvlinks as nvlinks,
    warnings_about_devices as warnings_about_devices,
    with_nvlinks as with_nvlinks,
)
