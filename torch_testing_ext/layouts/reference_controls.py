"""Controls of the reference: a training that does not train, or is not repeatable, says nothing of a layout. Pure."""

from __future__ import annotations

import torch

from torch_testing_ext.layouts.training_looks import LOAD, LayoutRun, Setup


def why_it_does_not_train(reference: LayoutRun) -> str:
    """Say that the reference has no gradients, that they are not finite, or that nothing moves; "" if it trains."""
    steps = sorted({step for step, kind, _ in reference.looks if kind == "grad"})
    if not steps:
        return "the reference records no gradients: call layout.step, or layout.watch"
    first = steps[0]
    for (_, kind, name), of in reference.looks.items():
        gradient = of[0].local if kind == "grad" else None
        if gradient is not None and not bool(gradient.isfinite().all()):
            return f"the reference's gradients are not finite: {name}"
    gradients = {n: of[0].local for (step, kind, n), of in reference.looks.items() if (step, kind) == (first, "grad")}
    if all(gradient is None or not gradient.any() for gradient in gradients.values()):
        return "the reference does not train: all gradients are zero"
    before = [reference.of_reference((-1, "start", name)) for name in gradients]
    after = [reference.of_reference((first, "param", name)) for name in gradients]
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0] is not None and pair[1] is not None]
    if pairs and all(torch.equal(*pair) for pair in pairs):  # type: ignore[arg-type]
        return "the reference does not train: no parameter moves"
    losses = [
        float(of[0].local) for (_, kind, _), of in reference.looks.items() if kind == "loss" and of[0].local is not None
    ]
    if len(losses) > 1 and len(set(losses)) == 1:
        return "the reference does not train: its loss is the same in each step, so it does not react to its input"
    return ""


def why_nothing_continues(run: LayoutRun, setup: Setup) -> str:
    """Say that the ranks which load have no step after that; "" if they train."""
    trained = any(kind == "grad" and step >= setup.first_step for step, kind, _ in run.looks)
    if setup.phase != LOAD or trained:
        return ""
    return f"{setup.arrow!r}: nothing is trained after loading: train more than save_after={setup.first_step} steps"
