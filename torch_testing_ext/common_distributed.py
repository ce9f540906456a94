"""Bases and decorators for tests of torch.distributed, under the names of torch.testing._internal.common_distributed.

Importing this module touches no accelerator. Wherever possible, the parent decides whether a test can run before it
starts a rank.
"""

import logging as _logging
import typing as _typing

from torch_testing_ext._hypothesis import own_given as _own_given  # noqa: F401  # it is there from then on
from torch_testing_ext._machine import flags
from torch_testing_ext._machine.lazy_values import LazyVal as LazyVal
from torch_testing_ext._machine.ports import (
    find_free_port as find_free_port,
    retry_on_connect_failures as retry_on_connect_failures,
)
from torch_testing_ext._machine.shared_names import share_names as _share
from torch_testing_ext._testing.bases import ranked_test_case as _ranked_test_case
from torch_testing_ext._testing.bases.continuous import MultiProcContinuousTest as MultiProcContinuousTest
from torch_testing_ext._testing.bases.distributed_bases import (
    DistributedTestBase as DistributedTestBase,
    run_subtests as run_subtests,
)
from torch_testing_ext._testing.bases.global_state import GlobalStateWarning as GlobalStateWarning
from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase as MultiProcessTestCase
from torch_testing_ext._testing.bases.multi_threaded import (
    MultiThreadedTestCase as MultiThreadedTestCase,
    spawn_threads_and_init_comms as spawn_threads_and_init_comms,
)
from torch_testing_ext._testing.bases.rank_verdicts import (
    Interrupted as Interrupted,
    RankError as RankError,
    RankFailure as RankFailure,
)
from torch_testing_ext._testing.bases.ranked_test_case import (
    DEFAULT_WORLD_SIZE as DEFAULT_WORLD_SIZE,
    TIMEOUT_DEFAULT as TIMEOUT_DEFAULT,
    TIMEOUT_OVERRIDE as TIMEOUT_OVERRIDE,
    get_timeout as get_timeout,
)
from torch_testing_ext._testing.bases.test_case import TestCase as TestCase
from torch_testing_ext._testing.helpers import stores_and_folders as _stores_and_folders
from torch_testing_ext._testing.helpers.contexts import captured_output as captured_output
from torch_testing_ext._testing.helpers.stores_and_folders import (
    FILE_SCHEMA as FILE_SCHEMA,
    cleanup_temp_dir as cleanup_temp_dir,
    create_device as create_device,
    create_tcp_store as create_tcp_store,
    init_multigpu_helper as init_multigpu_helper,
    initialize_temp_directories as initialize_temp_directories,
)
from torch_testing_ext._testing.helpers.suite_checks import (
    simple_sparse_reduce_tests as simple_sparse_reduce_tests,
    verify_ddp_error_logged as verify_ddp_error_logged,
    with_dist_debug_levels as with_dist_debug_levels,
    with_nccl_blocking_wait as with_nccl_blocking_wait,
)
from torch_testing_ext._testing.marks.backend_needs import (
    ACCELERATOR_DIST_BACKENDS as ACCELERATOR_DIST_BACKENDS,
    requires_accelerator_dist_backend as requires_accelerator_dist_backend,
    requires_gloo as requires_gloo,
    requires_mpi as requires_mpi,
    requires_nccl as requires_nccl,
    requires_nccl_shrink as requires_nccl_shrink,
    requires_nccl_version as requires_nccl_version,
    requires_ucc as requires_ucc,
    requires_xccl as requires_xccl,
)
from torch_testing_ext._testing.marks.collective_platforms import (
    PLATFORM_SUPPORTS_SYMM_MEM as PLATFORM_SUPPORTS_SYMM_MEM,
    core_dumps_disabled as core_dumps_disabled,
    evaluate_platform_supports_symm_mem as evaluate_platform_supports_symm_mem,
    has_efa as has_efa,
    requires_multicast_support as requires_multicast_support,
    skip_if_rocm_arch_multiprocess as skip_if_rocm_arch_multiprocess,
    skip_if_rocm_ver_atleast_multiprocess as skip_if_rocm_ver_atleast_multiprocess,
    skip_if_rocm_ver_lessthan_multiprocess as skip_if_rocm_ver_lessthan_multiprocess,
    sm_is_or_higher_than as sm_is_or_higher_than,
    tp_transports as tp_transports,
)
from torch_testing_ext._testing.marks.distributed_needs import (
    DDP_RANK_DEVICES as DDP_RANK_DEVICES,
    DistTestCases as DistTestCases,
    at_least_x_gpu as at_least_x_gpu,
    get_required_world_size as get_required_world_size,
    nccl_skip_if_lt_x_gpu as nccl_skip_if_lt_x_gpu,
    require_n_gpus_for_nccl_backend as require_n_gpus_for_nccl_backend,
    requires_ddp_rank as requires_ddp_rank,
    requires_world_size as requires_world_size,
    skip_if_lt_x_gpu as skip_if_lt_x_gpu,
    skip_if_no_gpu as skip_if_no_gpu,
)
from torch_testing_ext._testing.marks.needs import (
    TEST_SKIPS as TEST_SKIPS,
    Need as Need,
    TestSkip as TestSkip,
    needs_of as needs_of,
    requires as requires,
)
from torch_testing_ext._testing.marks.needs_of_devices import (
    requires_memory as requires_memory,
    requires_nvlink as requires_nvlink,
    requires_peer_access as requires_peer_access,
    requires_sm as requires_sm,
)
from torch_testing_ext._testing.marks.platform_needs import (
    import_transformers_or_skip as import_transformers_or_skip,
    skip_if_rocm as skip_if_rocm,
    skip_if_rocm_multiprocess as skip_if_rocm_multiprocess,
    skip_if_win32 as skip_if_win32,
)
from torch_testing_ext._testing.marks.settings_of_tests import (
    collectives_may_differ as collectives_may_differ,
    sanitize as sanitize,
)
from torch_testing_ext._testing.marks.skips_at_run import (
    skip_but_pass_in_sandcastle as skip_but_pass_in_sandcastle,
    skip_but_pass_in_sandcastle_if as skip_but_pass_in_sandcastle_if,
)
from torch_testing_ext._testing.marks.world_size_needs import (
    skip_if_odd_worldsize as skip_if_odd_worldsize,
    skip_if_small_worldsize as skip_if_small_worldsize,
)
from torch_testing_ext._testing.sharded.wrapper_models import (
    SaveForwardInputsModel as SaveForwardInputsModel,
    SaveForwardInputsModule as SaveForwardInputsModule,
)

if _typing.TYPE_CHECKING:
    from torch_testing_ext._testing.bases.threaded_group import ProcessLocalGroup as ProcessLocalGroup

    HAS_ACCELERATOR: bool

_share(__name__, _ranked_test_case, "DEFAULT_WORLD_SIZE", "TIMEOUT_DEFAULT", "TIMEOUT_OVERRIDE")

logger = _logging.getLogger(__name__)

# Flags of common_utils. `import *` exports neither these nor the bases that need the compiler: it must not look for
# devices or import the compiler.
_FLAGS = {"IS_SANDCASTLE", "TEST_CUDA", "TEST_HPU", "TEST_WITH_ROCM", "TEST_WITH_TSAN", "TEST_XPU"}


def __getattr__(name: str) -> _typing.Any:
    if name in _FLAGS:
        return flags.flag(name)
    if name == "HAS_ACCELERATOR":
        return any(map(flags.flag, ("TEST_CUDA", "TEST_HPU", "TEST_XPU")))
    if name == "tmp_dir":
        return _stores_and_folders.tmp_dir
    if name == "ProcessLocalGroup":
        from torch_testing_ext._testing.bases import threaded_group

        return threaded_group.ProcessLocalGroup
    if name.startswith("DynamoDistributed"):
        from torch_testing_ext._testing.bases import dynamo_bases

        return getattr(dynamo_bases, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
