"""Reads by Python's protocols, through numpy and by `.data` are told to all who listen."""

import copy
import pickle

import pytest
import torch

from torch_testing_ext._torch.tensors.tensor_reads import listen_to_reads, stop_listening_to_reads


class Heard(list):
    def on_read(self, method, tensor):
        self.append((method, id(tensor)))

    def on_alias(self, tensor, alias):
        self.append(("data", id(tensor), alias.data_ptr() == tensor.data_ptr()))


@pytest.fixture
def heard():
    listener = Heard()
    listen_to_reads(listener)
    yield listener
    stop_listening_to_reads(listener)


@pytest.mark.parametrize(
    ("read", "method"),
    [
        (bool, "__bool__"),
        (int, "__int__"),
        (float, "__float__"),
        (repr, "__repr__"),
        (lambda tensor: tensor.item(), "item"),
        (lambda tensor: tensor.tolist(), "tolist"),
        (lambda tensor: tensor.numpy(), "numpy"),
        ("{:.1f}".format, "__format__"),
        (pickle.dumps, "__reduce_ex__"),
    ],
)
def test_reads(heard, read, method):
    tensor = torch.tensor(1.0)
    read(tensor)
    assert heard[0] == (method, id(tensor))


def test_data(heard):
    tensor = torch.ones(2)
    tensor.data.fill_(3)
    assert heard == [("data", id(tensor), True)] and tensor.tolist() == [3, 3]
    other = torch.zeros(2)
    tensor.data = other
    assert tensor.data_ptr() == other.data_ptr()


def test_listeners():
    """The methods are replaced while anybody listens."""
    before = torch.Tensor.item
    first, second = Heard(), Heard()
    listen_to_reads(first)
    listen_to_reads(second)
    torch.ones(1).item()
    stop_listening_to_reads(first)
    torch.ones(1).item()
    assert (len(first), len(second)) == (1, 2) and torch.Tensor.item is not before
    stop_listening_to_reads(second)
    torch.ones(1).item()
    assert len(second) == 2 and torch.Tensor.item is before
    assert copy.deepcopy(torch.ones(1)).item() == 1
