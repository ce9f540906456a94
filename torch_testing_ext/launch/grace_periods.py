"""The seconds for which other ranks may go on after an event: one number for each situation.

docs/explanation/ranks.md lists those after the end of a rank. A time-out for an answer is beside what waits for it.
"""

# Peers of a dead rank fail within 0.02 s; on a loaded machine, ten times that. A death must be reported within 1 s.
AFTER_DEATH = 0.4
# Other ranks may be about to fail for reasons of their own, which are worth reporting together with the first.
AFTER_FAILURE = 1.0
# Threads cannot be ended, and processes of a launcher cannot be replaced, so more tests fail than this one.
AFTER_FAILURE_FOR_GOOD = 5.0
# One rank has skipped, others run: they may skip too, or wait for it in vain.
AFTER_SKIP = 5.0
# Milliseconds are enough, unless the machine is busy; a rank that holds the GIL in C never writes its flight recorder.
FOR_STACKS = 3.0
FOR_STACKS_AFTER_DEATH = 0.3
