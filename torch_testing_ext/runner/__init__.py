"""The test runner, torchtest: discovers, selects, plans, schedules and runs tests, and reports the results.

It may import everything; only `__main__` imports it. It never imports torch in the process that the user started:
importing test files and counting devices need torch, so they happen in processes forked from the preloaded server.
"""
