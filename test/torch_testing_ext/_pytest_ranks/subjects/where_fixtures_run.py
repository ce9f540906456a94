import os
from pathlib import Path

import pytest

PARENT = os.getpid()


def write(text):
    with open(Path(__file__).with_name("written"), "a") as file:
        file.write(text + "\n")


def where():
    return "parent" if os.getpid() == PARENT else f"rank {os.environ['RANK']}"


def fixture(scope, *, name):
    def body():
        write(f"set up {name} in {where()}")
        yield [name]
        write(f"tear down {name} in {where()}")

    return pytest.fixture(scope=scope, name=name)(body)


session = fixture("session", name="of_session")
module = fixture("module", name="of_module")
function = fixture("function", name="of_function")


@pytest.fixture
def in_ranks(dist_env, of_function):
    write(f"set up in_ranks in {where()}")
    yield dist_env.rank
    write(f"tear down in_ranks in {where()}")


@pytest.fixture
def on_top(in_ranks):
    return in_ranks + 1


@pytest.mark.world_size(2)
def test_a(of_session, of_module, of_function, on_top, tmp_path, monkeypatch):
    monkeypatch.setenv("CHANGED", "1")
    assert on_top == int(os.environ["RANK"]) + 1
    of_module.append(f"changed in {where()}")
    (tmp_path / where()).touch()
    write(f"test_a in {where()}: {of_session}")


def test_b(of_session, of_module):
    assert of_module == ["of_module"]
    assert "CHANGED" not in os.environ
    write(f"test_b in {where()}")
