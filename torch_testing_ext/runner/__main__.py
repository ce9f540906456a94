"""`python -m torch_testing_ext.runner`: the runner, under its former name."""

import sys

from .cli import console

sys.exit(console())
