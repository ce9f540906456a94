"""Evaluation by schedules that put adjacent stages into one rank."""

import unittest

import ranks
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV, ScheduleZBVZeroBubble


def evaluate_and_train(rank: int, kind: type) -> list[bool]:
    """Evaluate, train and evaluate two stages of four; return whether the results are right."""
    torch.manual_seed(0)
    model = [nn.Linear(2, 2) for _ in range(4)]
    batch, target = torch.randn(8, 2), torch.randn(8, 2)
    outputs = nn.Sequential(*model)(batch)
    nn.functional.mse_loss(outputs, target, reduction="sum").backward()
    mine = (rank, 3 - rank)
    wanted = [model[number].weight.grad for number in mine]
    for layer in model:
        layer.zero_grad()
    stages = [PipelineStage(model[number], number, 4, torch.device("cpu")) for number in mine]
    schedule = kind(stages, 4, loss_fn=nn.MSELoss(reduction="sum"), scale_grads=False)
    right = []
    for run in (schedule.eval, schedule.step, schedule.eval):
        got = run(*([batch] if rank == 0 else []), target=target if rank == 0 else None)
        if rank == 0:
            right.append(torch.allclose(got, outputs, atol=1e-5))
    for number, gradient in zip(mine, wanted, strict=True):
        got = model[number].weight.grad
        right.append(got is not None and gradient is not None and torch.allclose(got, gradient, atol=1e-4))
    return right


class EvalTest(unittest.TestCase):
    def test_zero_bubble(self) -> None:
        self.assertEqual(
            ranks.run(2, lambda rank: evaluate_and_train(rank, ScheduleZBVZeroBubble)), [[True] * 5, [True] * 2]
        )

    def test_dual_pipe(self) -> None:
        self.assertEqual(
            ranks.run(2, lambda rank: evaluate_and_train(rank, ScheduleDualPipeV)), [[True] * 5, [True] * 2]
        )


if __name__ == "__main__":
    unittest.main()
