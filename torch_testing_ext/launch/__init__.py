"""Starts, watches, ends and judges ranks. Depends on processes, files and signals, not on a test framework.

run = launch(Job(...))            start the ranks, in milliseconds; each runs a body in its RankContext
result = watch(run, ...)          watch them until all have ended
verdict = result.verdict(Case())  judge them: one outcome and one message for all ranks

`judging` explains failures, `persistent_ranks` has ranks that run one task after another: import them where they are
needed, since a test that passes on ranks of its own does without.
"""

from .account_writer import (
    AccountWriter as AccountWriter,
    format_error as format_error,
    sites_of as sites_of,
    summarize as summarize,
)
from .accounts import (
    ERROR_EXIT_CODE as ERROR_EXIT_CODE,
    OwnWarning as OwnWarning,
    RankAccount as RankAccount,
    RankEnding as RankEnding,
    read_account as read_account,
)
from .causes import Cause as Cause, cause_in as cause_in, cause_of as cause_of
from .client import (
    CannotStart as CannotStart,
    Run as Run,
    close as close,
    discard as discard,
    launch as launch,
    launch_fresh as launch_fresh,
    launch_from_here as launch_from_here,
    new_directory as new_directory,
    preload_hints as preload_hints,
    prepare as prepare,
)
from .context import RankContext as RankContext, current_context as current_context
from .job import Job as Job, Named as Named, ProcessContext as ProcessContext
from .launchers import Launched as Launched, this_launch as this_launch
from .rank_report import Exit as Exit, RankReport as RankReport, assemble_report as assemble_report, now as now
from .verdict import (
    Case as Case,
    Expected as Expected,
    Outcome as Outcome,
    Verdict as Verdict,
    failed_by_itself as failed_by_itself,
)
from .watch import end as end, watch as watch
