import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from torch_testing_ext._collectives.sanitizer import replica_check
from torch_testing_ext._testing.marks.settings_of_tests import sanitize


@sanitize("replicas")
@pytest.mark.world_size(2)
def test_many(dist_env):
    replica_check.MOST_BYTES = 2000
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(10):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
