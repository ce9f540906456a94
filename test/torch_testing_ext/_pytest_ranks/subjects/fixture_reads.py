import os

import pytest

SIZE = int(os.environ.get("WORLD_SIZE", 1))
COPIES = dict(os.environ), os.environ.copy(), "HOME" in os.environ


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.world_size(2)
def test_rank(rank):
    assert os.environ["WORLD_SIZE"] == "2"


@pytest.mark.skipif("RANK" not in os.environ, reason="not launched")
def test_launched():
    assert "RANK" not in os.environ
