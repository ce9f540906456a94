"""What a run tells: on the console, in files, to GitHub.

Written from events alone. A report never asks an engine, and never decides an outcome: one that cannot be written is a
warning, and the run's outcome and exit code stand.
"""
