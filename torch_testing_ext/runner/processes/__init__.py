"""The processes of a run: preloaded server, one process for each file, a supervisor and a worker for each unit."""
