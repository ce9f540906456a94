"""A training script under test, started as torchrun starts it, with arguments and variables.

Run it: pytest examples/cookbook/test_script.py
"""

from pathlib import Path

import pytest

from torch_testing_ext.ranks import run_script

SCRIPT = Path(__file__).parents[1] / "train.py"


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_converges(ranks):
    run = run_script(SCRIPT, ranks=ranks, env={"OMP_NUM_THREADS": "1"}, timeout=60)
    mean_of_ranks = (ranks - 1) / 2
    assert run.outputs == (f"fitted {mean_of_ranks:.3f}\n",) * ranks
