"""The processes of a run: zygote, one process for each file, a nanny and a worker for each unit."""
