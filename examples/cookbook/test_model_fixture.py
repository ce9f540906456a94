"""Two kinds of fixtures: one is made once and inherited by all ranks, one is made in each rank, with the group.

Run it: pytest examples/cookbook/test_model_fixture.py
"""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture(scope="module")
def weights():
    """Expensive, and the same for all: made once, before the ranks start, which share its memory."""
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4).state_dict()


@pytest.fixture
def model(dist_env, weights):
    """Needs the process group: made in every rank, for each test."""
    model = torch.nn.Linear(4, 4)
    model.load_state_dict(weights)
    return DistributedDataParallel(model.to(dist_env.device))


@pytest.mark.world_size(2)
def test_forward(model, dist_env):
    assert model(torch.ones(3, 4, device=dist_env.device)).shape == (3, 4)


@pytest.mark.world_size(2)
def test_each_test_has_its_own_model(model, weights):
    torch.testing.assert_close(model.module.state_dict(), weights)
