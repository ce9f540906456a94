"""Parameters of a module itself are read and replaced."""

import torch
from torch import nn

from torch_testing_ext._torch import module_parts


def test_own_parameters():
    outer = nn.Sequential(nn.Linear(2, 3, bias=False))
    assert module_parts.own_parameters(outer) == {}
    assert {name: value is None for name, value in module_parts.own_parameters(outer[0]).items()} == {
        "weight": False,
        "bias": True,
    }


def test_attributes_of_every_module():
    """Nothing that a user gives a module is among them, and no list of weights is its user's."""
    gru = nn.GRU(2, 2)
    gru.mine = nn.Linear(1, 1)
    held = {name for name, value in vars(gru).items() if isinstance(value, (list, dict)) and value}
    assert held <= {*module_parts.OWN_OF_MODULES, "_flat_weights_names", "_all_weights", "_flat_weight_refs"}
    assert "mine" not in module_parts.OWN_OF_MODULES


def test_put_parameter():
    linear = nn.Linear(2, 1, bias=False)
    put = nn.Parameter(torch.zeros(1, 2))
    module_parts.put_parameter(linear, "weight", put)
    assert linear.weight is put and [*linear.parameters()] == [put]
    assert linear(torch.ones(2)).item() == 0


def test_weights_of_recurrent_modules():
    """They compute with a second list of their weights."""
    gru = nn.GRU(2, 2)
    for name, value in [*gru.named_parameters()]:
        module_parts.put_parameter(gru, name, nn.Parameter(torch.zeros_like(value)))
    assert all(not weight.any() for weight in gru._flat_weights)
    output, _ = gru(torch.ones(1, 2))
    assert not output.any()


def test_tensors_that_count_as_parameters():
    class Other(torch.Tensor):
        pass

    tensor = torch.ones(1).as_subclass(Other)
    for does in (True, False, False):
        module_parts.count_as_parameter(tensor, does)
        assert isinstance(tensor, nn.Parameter) is does
