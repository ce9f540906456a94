"""What run_test.py does: discover, select, plan, schedule, run, report.

Never imports torch in the process that the user started: what needs it (importing test files, counting devices)
happens in processes forked from a zygote.
"""
