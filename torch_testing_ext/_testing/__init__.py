"""The test bases: ranks as fresh processes, as persistent processes and as threads; and `run_tests`."""
