import pytest
import pytest_asyncio


@pytest.mark.asyncio
@pytest.mark.world_size(2)
async def test_async(fixture_of_parent, dist_env):
    assert fixture_of_parent + dist_env.rank == 1


@pytest_asyncio.fixture
async def fixture_of_parent():
    return 1


@pytest_asyncio.fixture
async def group(dist_env): ...


@pytest.mark.world_size(2)
def test_fixture(group): ...


@pytest_asyncio.fixture
async def values(dist_env):
    yield 1


@pytest.mark.world_size(2)
def test_generator(values): ...
