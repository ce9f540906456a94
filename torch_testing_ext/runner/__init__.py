"""run_test.py: discovers, selects, plans, schedules and runs tests, and reports the results.

Never imports torch in the process that the user started. Importing test files and counting devices need torch, so they
happen in processes forked from the preloaded server.
"""
