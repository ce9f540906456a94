"""The options of a run: their declaration, their sources, and their words on a command line."""

from .all_options import OPTION_TABLE as OPTION_TABLE, Options as Options
from .declaring import Level as Level, OptionSpec as OptionSpec
from .values import (
    ALL_CPUS as ALL_CPUS,
    Action as Action,
    CannotRun as CannotRun,
    CountAs as CountAs,
    Gpus as Gpus,
    Loader as Loader,
    Repeat as Repeat,
    Rerun as Rerun,
    ShardSpec as ShardSpec,
    Shuffle as Shuffle,
    StatusLevel as StatusLevel,
    UsageError as UsageError,
    Verbosity as Verbosity,
    Warm as Warm,
)
