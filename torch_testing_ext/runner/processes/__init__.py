"""The processes of a run: preloaded server, one process for each file, a supervisor and a worker for each unit.

Each has two sides: what runs in the process, and what the runner sees of it. Imports neither engine nor reports.
"""
