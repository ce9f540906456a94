"""The engine multiplies what DDP multiplies: the same shapes and strides, at the start of memory of its own.

cuBLAS chooses a kernel, and with it the rounding, by these and by the alignment of the operands. So the suite may
compare a step with DDP's bit for bit on GPUs, too.
"""

from copy import deepcopy

import torch
from loops import net
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, compile
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class Operands(TorchDispatchMode):
    """Notes shape, strides and place in memory of all that is multiplied."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in MATMULS:
            self.noted.append((str(func), *map(layout, args)))
        return func(*args, **(kwargs or {}))


def layout(tensor):
    own_memory = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), own_memory


def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).square().sum()
    loss.backward()
    optimizer.step()
    return loss


class TestMatmulOperands(DTensorContinuousTestBase):
    """Three steps of DDP and of the engine."""

    world_size = 2

    def _operands(self, step, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        operands = Operands()
        for seed in range(3):
            batch = torch.randn(16, 50, generator=torch.Generator().manual_seed(seed + 3 * self.rank))
            with operands:
                step(model, optimizer, batch)
        return operands.noted

    @parametrize("style", ["replicate", "fully_shard"])
    def test_are_those_of_ddp(self, style):
        # Widths whose rows are not aligned, so that a place in a flat tensor would not be.
        model = net(50, 31, 7)
        expected = self._operands(train_step, DistributedDataParallel(deepcopy(model)))
        compiled = compile(parallel_mode=DataParallel(style))(train_step)
        self.assertEqual(self._operands(compiled, model), expected)
        self.assertEqual(len(expected), 3 * 5)


instantiate_parametrized_tests(TestMatmulOperands)

if __name__ == "__main__":
    run_tests()
