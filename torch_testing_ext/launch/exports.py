"""The names that other rooms take from `launch`."""

from torch_testing_ext._process.fork_host import Exit as Exit
from torch_testing_ext._tests.outcomes import TestOutcome as TestOutcome
from torch_testing_ext.launch.account_writer import (
    AccountWriter as AccountWriter,
    format_error as format_error,
    sites_of as sites_of,
    summarize as summarize,
)
from torch_testing_ext.launch.accounts import (
    ERROR_EXIT_CODE as ERROR_EXIT_CODE,
    OwnWarning as OwnWarning,
    RaisedError as RaisedError,
    RankAccount as RankAccount,
    RankEnding as RankEnding,
    now as now,
    read_account as read_account,
)
from torch_testing_ext.launch.causes import Cause as Cause, cause_in as cause_in, cause_of as cause_of
from torch_testing_ext.launch.fork_server_client import CannotStart as CannotStart, Run as Run
from torch_testing_ext.launch.jobs import Job as Job, ProcessContext as ProcessContext
from torch_testing_ext.launch.launched_by import Launched as Launched, this_launch as this_launch
from torch_testing_ext.launch.named import Named as Named
from torch_testing_ext.launch.rank_context import (
    RankContext as RankContext,
    current_context as current_context,
    local_rank_of as local_rank_of,
)
from torch_testing_ext.launch.rank_reports import (
    RankReport as RankReport,
    assemble_report as assemble_report,
    failed_by_itself as failed_by_itself,
)
from torch_testing_ext.launch.start import (
    close as close,
    discard as discard,
    keep_directory as keep_directory,
    launch as launch,
    launch_fresh as launch_fresh,
    launch_from_here as launch_from_here,
    new_directory as new_directory,
    preload_hints as preload_hints,
    prepare as prepare,
)
from torch_testing_ext.launch.verdict import Case as Case, Expected as Expected, Verdict as Verdict
from torch_testing_ext.launch.watching.run_watcher import watch as watch

from .launched.peers import why_no_rank as why_no_rank
