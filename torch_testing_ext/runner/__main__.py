"""`python -m torch_testing_ext.runner`: run_test.py for the project in the working directory."""

import sys
from pathlib import Path

from .cli import main

sys.exit(main(sys.argv[1:], Path.cwd()))
