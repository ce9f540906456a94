"""Compares what a training loop returns under DDP with what it returns by the engine."""

from unittest import mock

import torch
from loops import LOOPS, ByEngine, Parallel

from torch_testing_ext._spmd import roster, state_engine

leaves = torch.utils._pytree.tree_leaves


def compare(test, name, style, early, loops=LOOPS):
    """Run a loop under DDP and by the engine, and compare all that it returns."""
    torch.manual_seed(test.rank)
    expected = loops[name](Parallel(test.rank))
    torch.manual_seed(test.rank)
    with mock.patch.object(roster, "EARLY", early), mock.patch.object(state_engine, "EARLY", early):
        found = loops[name](ByEngine(test.rank, style))
    mine, theirs = (
        [getattr(leaf, "full_tensor", lambda leaf=leaf: leaf)() for leaf in leaves(each)] for each in (found, expected)
    )
    test.assertEqual(len(mine), len(theirs))
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        test.assertEqual(one, other, rtol=1e-5, atol=1e-6, msg=f"{name}, rank {test.rank}: value {number}")
