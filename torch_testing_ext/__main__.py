"""`python -m torch_testing_ext`: the runner for the project in the working directory, as the script `torchtest`."""

import sys

from torch_testing_ext.runner.cli import console

sys.exit(console())
