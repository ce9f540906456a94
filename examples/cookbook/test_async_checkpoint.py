"""An asynchronous checkpoint holds the values of the moment of the save, not those of later steps.

Run it: pytest examples/cookbook/test_async_checkpoint.py
"""

import pytest
import torch
import torch.distributed.checkpoint as checkpoint


@pytest.mark.world_size(2, backend="gloo")  # async_save needs a backend for the CPU
def test_training_goes_on(dist_env, tmp_path):
    weight = torch.full((4,), float(dist_env.rank))
    # Every rank saves a tensor of its own.
    name = f"weight of rank {dist_env.rank}"
    saving = checkpoint.async_save({name: weight}, checkpoint_id=tmp_path)
    weight += 100  # the next step
    saving.result()

    state = {name: torch.zeros(4)}
    checkpoint.load(state, checkpoint_id=tmp_path)
    assert state[name].tolist() == [float(dist_env.rank)] * 4
