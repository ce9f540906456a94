"""Process groups whose ranks are threads, under the names of torch.testing._internal.distributed.multi_threaded_pg."""

from torch_testing_ext._testing.bases.threaded_group import (
    LeftAlone as LeftAlone,
    ProcessLocalGroup as ProcessLocalGroup,
    Rendezvous as Rendezvous,
    ThreadLocalWorld as ThreadLocalWorld,
    WorldData as WorldData,
    _create_threaded_pg as _create_threaded_pg,
    _install_threaded_pg as _install_threaded_pg,
    _uninstall_threaded_pg as _uninstall_threaded_pg,
)
