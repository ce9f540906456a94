"""A script that runs a body of kit.aspect_bodies in its rank."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kit.aspect_bodies import BODIES

BODIES[sys.argv[1]](int(os.environ["RANK"]))
