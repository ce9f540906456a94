"""Chooses what runs, when and on which devices: selection, plan, leases, and the memory between runs.

Pure, except for the search for test files and the memory of earlier runs. Imports neither processes nor engine nor
reports.
"""
