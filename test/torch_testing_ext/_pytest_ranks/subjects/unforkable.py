import threading

import pytest


@pytest.fixture
def thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="busy")
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.mark.world_size(2)
def test_a(thread): ...


@pytest.mark.world_size(2)
def test_b(): ...


@pytest.mark.world_size(2)
def test_c(monkeypatch, spawning): ...


@pytest.fixture
def spawning(monkeypatch):
    monkeypatch.setenv("TORCH_TESTING_EXT_START", "spawn")
