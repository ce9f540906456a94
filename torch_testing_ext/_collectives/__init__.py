"""The collectives that ranks have issued: how they are recorded, and the rules that find mistakes in them.

Records come from torch's flight recorder, from the log of `--sanitize`, or from ranks that are threads. The rules are
pure: they compare the records of all ranks, and return findings. Imports `_process` and `_torch`.
"""
