"""`torch.fakeacc`: what torch and tests ask of the module of a device, as they ask it of `torch.cuda`."""

import torch

from .fake_devices import (
    Properties as Properties,
    _is_in_bad_fork as _is_in_bad_fork,
    _lazy_init as _lazy_init,
    can_device_access_peer as can_device_access_peer,
    current_device as current_device,
    device as device,
    device_count as device_count,
    get_amp_supported_dtype as get_amp_supported_dtype,
    get_device_capability as get_device_capability,
    get_device_name as get_device_name,
    get_device_properties as get_device_properties,
    init as init,
    is_available as is_available,
    is_bf16_supported as is_bf16_supported,
    is_initialized as is_initialized,
    mem_get_info as mem_get_info,
    set_device as set_device,
)
from .fake_generators import (
    get_rng_state as get_rng_state,
    get_rng_state_all as get_rng_state_all,
    initial_seed as initial_seed,
    manual_seed as manual_seed,
    manual_seed_all as manual_seed_all,
    set_rng_state as set_rng_state,
    set_rng_state_all as set_rng_state_all,
)
from .fake_memory import (
    empty_cache as empty_cache,
    max_memory_allocated as max_memory_allocated,
    max_memory_reserved as max_memory_reserved,
    memory_allocated as memory_allocated,
    memory_reserved as memory_reserved,
    memory_stats as memory_stats,
    reset_peak_memory_stats as reset_peak_memory_stats,
)
from .fake_streams import (
    _sleep as _sleep,
    current_stream as current_stream,
    default_stream as default_stream,
    set_late_streams as set_late_streams,
    set_stream as set_stream,
    stream as stream,
    synchronize as synchronize,
)
from .no_compiler import (
    CppWrapperCodegen as CppWrapperCodegen,
    PythonWrapperCodegen as PythonWrapperCodegen,
    Scheduling as Scheduling,
    WrapperFxCodegen as WrapperFxCodegen,
)

Stream = torch.Stream
Event = torch.Event
