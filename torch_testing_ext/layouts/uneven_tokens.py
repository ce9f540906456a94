"""Token ids and labels for a test of layouts, with another number of labels that count in each row."""

from __future__ import annotations

import torch


def tokens(vocabulary: int, batch: int, length: int, *, empty: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Make ids and labels of the next ones; labels of -100 do not count. Rows and batches differ in how many do.

    Equal shares would make the average of averages right, and equal batches one that divides by the count of another
    step. `empty`: the last half of the rows has no label that counts.
    Random numbers come from torch's generator, so that `torch.manual_seed(step)` before makes them those of a step.
    """
    drawn = torch.randint(vocabulary, (batch, length + 1))
    ids, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].clone()
    position = torch.arange(length)
    # Too few to make the halves of a batch alike, as the first row has most.
    lost_by_first = int(torch.randint(min(5, 1 + length // 3), ()))
    for row in range(batch):
        # Some positions, so that all parts of a sequence lose some, and later ones more.
        labels[row, (position * (row + 3)) % (row + 4) > 3 + position // 2] = -100
        labels[row, length - 1 - (row or lost_by_first) % max(1, length - 1) :] = -100
    if empty:
        labels[(batch + 1) // 2 :] = -100
    return ids, labels
