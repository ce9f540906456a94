"""A function with `world_size` fails in rank 1; the story goes from its call to its report."""

import pytest
from kit import story


@pytest.fixture(autouse=True)
def begins():
    story.begin()


@pytest.mark.world_size(2)
def test_sum(dist_env):
    assert dist_env.rank == 0
