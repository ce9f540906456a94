"""Compiled train steps against DDP and FSDP2: step time, kernels, overlap, and the same weights."""

ORDER = 80
EXTRA = True
LIMIT = 110
QUICK_LIMIT = 80


def check(c):
    import spmd_steps

    spmd_steps.measure(c)
