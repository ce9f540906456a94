"""Functions and scripts in ranks, for any test framework."""

from torch_testing_ext._testing.bases.functions_and_scripts import (
    ScriptRun as ScriptRun,
    run_script as run_script,
    spawn as spawn,
)
