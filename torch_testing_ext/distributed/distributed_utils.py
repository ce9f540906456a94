"""A process group without collectives, under the names of torch.testing._internal.distributed.distributed_utils."""

from torch_testing_ext._testing.bases.fake_groups import (
    MockProcessGroup as MockProcessGroup,
    create_mock_pg as create_mock_pg,
    mock_init_dist as mock_init_dist,
    with_dist as with_dist,
    with_fake_comms as with_fake_comms,
)
