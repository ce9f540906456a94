"""The only package that uses private names of torch, with a module for each subject.

Every function hides one private name, and its docstring gives the versions of torch in which it is known to work.
At module level, it imports nothing beyond `import torch, torch.distributed`.
"""

from .accelerator_state import (
    accelerator_is_in_bad_fork as accelerator_is_in_bad_fork,
    accelerator_is_initialised as accelerator_is_initialised,
    has_multicast as has_multicast,
    other_accelerator_is_built as other_accelerator_is_built,
)
from .built_with import (
    cpu_capabilities as cpu_capabilities,
    cpu_kernels as cpu_kernels,
    extension_device_type as extension_device_type,
    has_lapack as has_lapack,
    is_internal_build as is_internal_build,
    onednn_uses_arm_compute_library as onednn_uses_arm_compute_library,
)
from .checkpoint import (
    new_extension_registry as new_extension_registry,
    stream_extension_class as stream_extension_class,
)
from .comparing import compare_tensors as compare_tensors, script_container_types as script_container_types
from .cuda_sharing import (
    fold_device_numbers as fold_device_numbers,
    forget_peak_memory as forget_peak_memory,
    nccl_version as nccl_version,
    peak_memory as peak_memory,
    when_cuda_is_first_used as when_cuda_is_first_used,
)
from .cuda_state import (
    caching_allocator_is_enabled as caching_allocator_is_enabled,
    cupti_version as cupti_version,
    describing_device as describing_device,
    forget_blas_workspaces as forget_blas_workspaces,
    has_cupti as has_cupti,
    hipblaslt_version as hipblaslt_version,
    supports_green_contexts as supports_green_contexts,
    supports_workqueues as supports_workqueues,
)
from .dtensor import (
    concatenate_meshes as concatenate_meshes,
    is_functional_tensor as is_functional_tensor,
    is_local_tensor as is_local_tensor,
)
from .errors import says_peer_is_lost as says_peer_is_lost, says_wait_timed_out as says_wait_timed_out
from .first_use import first_use as first_use, stop_noting as stop_noting
from .flight_recorder import (
    TORCH_FOLDER as TORCH_FOLDER,
    MadeGroup as MadeGroup,
    errors_of_collectives as errors_of_collectives,
    forget_collectives as forget_collectives,
    forget_groups as forget_groups,
    group_in_creation as group_in_creation,
    has_flight_recorder as has_flight_recorder,
    is_of_torch as is_of_torch,
    made_groups as made_groups,
    number_of_group as number_of_group,
    on_error_of_collectives as on_error_of_collectives,
    recorded_collectives as recorded_collectives,
    sequence_numbers as sequence_numbers,
    take_collectives as take_collectives,
    watch_process_groups as watch_process_groups,
)
from .fsdp import (
    all_gather_name as all_gather_name,
    compiled_autograd as compiled_autograd,
    compiling_in_this_process as compiling_in_this_process,
    cuda_spin as cuda_spin,
    fsdp_is_idle as fsdp_is_idle,
    fsdp_keeps_parameters_after_forward as fsdp_keeps_parameters_after_forward,
    fsdp_param_group_module as fsdp_param_group_module,
    fsdp_reshard_preceded_by as fsdp_reshard_preceded_by,
    fsdp_syncs_on_cpu as fsdp_syncs_on_cpu,
    has_triton as has_triton,
    reduce_scatter_name as reduce_scatter_name,
    replicated_parameters as replicated_parameters,
)
from .launch import (
    end_compile_workers as end_compile_workers,
    fake_process_group as fake_process_group,
    made_groups_before as made_groups_before,
    only_gloo as only_gloo,
    register_fake_backend as register_fake_backend,
    reset_dynamo as reset_dynamo,
    wait_without_end as wait_without_end,
)
from .local_tensor import (
    for_each_local_rank as for_each_local_rank,
    forget_dtensor_rng as forget_dtensor_rng,
    local_ints as local_ints,
    local_ranks as local_ranks,
    local_tensor_mode as local_tensor_mode,
    record_autograd as record_autograd,
    without_local_tensors as without_local_tensors,
)
from .process_state import (
    DYNAMO as DYNAMO,
    INDUCTOR as INDUCTOR,
    exempt_imported as exempt_imported,
    forget_compiled as forget_compiled,
    pop_torch_function_mode as pop_torch_function_mode,
    postpone_collection as postpone_collection,
    set_torch_function_state as set_torch_function_state,
    strict_dynamo as strict_dynamo,
    torch_function_modes as torch_function_modes,
    torch_function_state as torch_function_state,
    without_compiled_autograd as without_compiled_autograd,
)
from .properties import abort_process_groups as abort_process_groups, forget_meshes as forget_meshes
from .shard_order import (
    redistribute_local as redistribute_local,
    replaced_op_strategy as replaced_op_strategy,
    shard_order as shard_order,
    strided_shard as strided_shard,
    take_placements_literally as take_placements_literally,
)
from .spmd import (
    at_end_of_backward as at_end_of_backward,
    below_autograd as below_autograd,
    compiled_functions_run_eagerly as compiled_functions_run_eagerly,
    data_dependent_errors as data_dependent_errors,
    disable_torch_function as disable_torch_function,
    dispatch_mode_class as dispatch_mode_class,
    fake_like as fake_like,
    fake_of_captured as fake_of_captured,
    fakes_lacking_attributes as fakes_lacking_attributes,
    fixed_size as fixed_size,
    foreach_by_default as foreach_by_default,
    global_module_hooks as global_module_hooks,
    import_tracer as import_tracer,
    inductor_compile as inductor_compile,
    inductor_decompositions as inductor_decompositions,
    inside_backward as inside_backward,
    is_fake as is_fake,
    kernel_choices as kernel_choices,
    local_tensor as local_tensor,
    new_fake_mode as new_fake_mode,
    object_collectives_call as object_collectives_call,
    python_dispatcher as python_dispatcher,
    raw_operation as raw_operation,
    saved_tensor_hooks as saved_tensor_hooks,
    seen_as_compiling as seen_as_compiling,
    set_grad_enabled as set_grad_enabled,
    set_local_tensor as set_local_tensor,
    show_class_of_fakes as show_class_of_fakes,
    storage_key as storage_key,
    tracing_graph as tracing_graph,
    tree as tree,
    values_unknown as values_unknown,
    without_dispatch as without_dispatch,
)
from .state_dict import gathered as gathered, is_sharded as is_sharded, on_state_dict as on_state_dict
from .subclasses import (
    correct_aliasing as correct_aliasing,
    exportable_constructor as exportable_constructor,
    is_tensor_constructor as is_tensor_constructor,
    make_wrapper_subclass as make_wrapper_subclass,
    rpc_transports as rpc_transports,
)
from .threads import (
    backend_plugin as backend_plugin,
    finished_work as finished_work,
    get_world as get_world,
    isolate_threads as isolate_threads,
    one_sharding_at_a_time as one_sharding_at_a_time,
    set_backend_plugin as set_backend_plugin,
    set_world as set_world,
    world_class as world_class,
)

postpone_collection()
