"""What tests of both sides have: a group of two ranks, as each side makes it."""

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

if "TORCHELASTIC_RUN_ID" in os.environ:

    @pytest.fixture(scope="session", autouse=True)
    def group():
        # Unless it is told otherwise, a rank waits for its peers for half an hour.
        dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("GROUP_TIMEOUT", "1800"))))

else:

    @pytest.fixture(autouse=True)
    def group(dist_env): ...
