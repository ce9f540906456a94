"""Files of runs, and commands that compare several of them.

A report writes them; all else here reads: pure functions from runs to views, and a thin command for each.
"""
