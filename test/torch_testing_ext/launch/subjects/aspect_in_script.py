"""A script that runs a body of test_aspects.py in its rank."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from test_aspects import BODIES

BODIES[sys.argv[1]](int(os.environ["RANK"]))
