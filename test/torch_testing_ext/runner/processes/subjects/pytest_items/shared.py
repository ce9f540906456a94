import os

import pytest

MADE = []


@pytest.fixture(scope="module")
def model():
    MADE.append("model")
    yield os.getpid()


@pytest.fixture(scope="module", params=["a", "b"])
def variant(request):
    return request.param


def test_model_1(model):
    pass


def test_model_2(model):
    assert (model, MADE) == (os.getpid(), ["model"])


def test_variant(variant):
    assert MADE == []


def test_server(server, model):
    assert model == server


def test_alone(tmp_path_factory):
    assert MADE == []


class TestClass:
    @classmethod
    def setup_class(cls):
        cls.seen = []

    def test_1(self):
        self.seen.append(1)

    def test_2(self):
        assert self.seen == [1]


@pytest.fixture(scope="class")
def of_class():
    return os.getpid()


class TestA:
    def test_1(self, of_class):
        pass

    def test_2(self, of_class):
        assert of_class == os.getpid()


class TestB:
    def test_1(self, of_class):
        pass


@pytest.fixture(scope="class")
def shared():
    yield


@pytest.fixture(scope="class")
def ends_badly():
    yield
    raise ValueError("the last one")


@pytest.mark.usefixtures("shared")
class TestDies:
    def test_1(self):
        pass

    def test_2(self):
        os._exit(0)

    def test_3(self):
        pass


@pytest.mark.usefixtures("ends_badly")
class TestEnd:
    def test_1(self):
        pass

    def test_2(self):
        pass
