"""Facts about tests and ranks, for every room: outcomes, notes for the runner, kept reports, launchers' variables.

It imports nothing that is slow: pytest's plugin and the process that the user starts need it without the rest.
"""
