"""A training script under test, started as torchrun starts it, with arguments and variables.

Run it: pytest examples/cookbook/test_script.py
"""

from pathlib import Path

import pytest

from torch_testing_ext.ranks import run_script

SCRIPT = Path(__file__).parents[1] / "train.py"


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_converges(world_size):
    run = run_script(SCRIPT, world_size=world_size, env={"OMP_NUM_THREADS": "1"}, timeout=60)
    mean_of_ranks = (world_size - 1) / 2
    assert run.outputs == (f"fitted {mean_of_ranks:.3f}\n",) * world_size
