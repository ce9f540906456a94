"""Functions and scripts in ranks, for any test framework."""

from torch_testing_ext._cases.scripts import ScriptRun as ScriptRun, run_script as run_script
from torch_testing_ext._cases.spawning import spawn as spawn
