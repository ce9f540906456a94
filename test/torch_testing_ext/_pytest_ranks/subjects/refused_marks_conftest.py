import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if "from_hook" in item.name:
            item.add_marker(pytest.mark.world_size(2))
        if "list" in item.name:
            item.add_marker(pytest.mark.world_size([2, 3]))
        if "alone" in item.name:
            item.add_marker("standalone")
        if "doctest" in item.name:
            item.add_marker(pytest.mark.world_size(2))


def pytest_runtest_setup(item):
    if "from_set_up" in item.name:
        item.parent.add_marker(pytest.mark.world_size(2))


@pytest.fixture
def adds(request):
    request.applymarker(pytest.mark.world_size(2))
