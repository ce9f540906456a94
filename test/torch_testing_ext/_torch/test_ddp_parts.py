"""What DDP logs of its passes can be read."""

import torch
from kit.own_process import in_own_process
from kit.plain_groups import world_of_one
from torch import nn

from torch_testing_ext._torch import ddp_parts


@in_own_process
def test_log():
    world_of_one()
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    logged = ddp_parts.logged_by_ddp(model)
    assert (logged["world_size"], logged["module_name"], logged["backend_name"]) == (1, "Linear", "gloo")
