"""The test bases: ranks as fresh processes, as persistent processes and as threads; and how tests are run."""
