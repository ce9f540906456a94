import pytest


@pytest.fixture(scope="module")
def group(dist_env): ...


@pytest.mark.world_size(2, scope="class")
def test_too_wide(group): ...


@pytest.mark.world_size(2, scope="session")
def test_unknown(): ...


@pytest.mark.world_size(2, scope="module", isolated=True)
def test_isolated(): ...
