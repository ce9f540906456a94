"""Functions and scripts in ranks, for any test framework, and the types of pytest's fixtures."""

from torch_testing_ext._testing.bases.scripts import ScriptRun as ScriptRun, run_script as run_script
from torch_testing_ext._testing.bases.spawned_functions import spawn as spawn
from torch_testing_ext._testing.bases.values_of_fixtures import (
    DistEnv as DistEnv,
    Ranks as Ranks,
    RunScript as RunScript,
    Spawn as Spawn,
    Traffic as Traffic,
)
