"""The test bases: ranks as fresh processes, as persistent processes and as threads; scripts; and `run_tests`.

Imports `launch`, the marks and the helpers. Nothing here imports DTensor or FSDP.
"""
