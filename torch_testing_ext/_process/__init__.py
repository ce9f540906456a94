"""The basics of every process that we start; each module is named after its subject.

It imports nothing of this package and no test framework. Three modules know of tests and ranks, since every room needs
them without the rest: `notes`, `launcher_variables` and `kept_failures`; `fork_safety` knows whose threads do no harm.
"""
