"""Functions and scripts in ranks, for any test framework."""

from torch_testing_ext._testing.bases.scripts import ScriptRun as ScriptRun, run_script as run_script
from torch_testing_ext._testing.bases.spawned_functions import spawn as spawn
