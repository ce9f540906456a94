"""How ranks are born, watched and ended. Knows processes, files and signals; no test framework.

run = launch(Job(...))          start the ranks, in milliseconds
outcome = watch(run, ...)       see them to their end
verdict = judge(outcome...)     one outcome and one message for all of them

crew = Crew(Job(...))           ranks that stay, for one order after another
"""

from .client import CannotStart, Run, close, launch, new_directory
from .job import Job, Named, Surroundings
from .persistent_ranks import Crew, Order, orders
from .rank import Report, summarize
from .report import Ending, Exit, RankReport, now, settle
from .verdict import Case, Expected, Outcome, Verdict, judge
from .watch import end, watch

__all__ = [
    "CannotStart",
    "Case",
    "Crew",
    "Ending",
    "Exit",
    "Expected",
    "Job",
    "Named",
    "Order",
    "Outcome",
    "RankReport",
    "Report",
    "Run",
    "Surroundings",
    "Verdict",
    "close",
    "end",
    "judge",
    "launch",
    "new_directory",
    "now",
    "orders",
    "settle",
    "summarize",
    "watch",
]
