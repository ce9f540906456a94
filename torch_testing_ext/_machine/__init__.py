"""The machine that tests run on: its accelerators and their masks, locks on devices, memory, ports, flags and seeds.

Nothing here touches an accelerator in the process that asks. Imports `_process` and `_torch`; knows nothing of ranks.
"""
