"""Compiled train steps (fx) against DDP and FSDP2 in eager mode: step time, kernels, overlap, and the same weights."""

ORDER = 80
EXTRA = True
LIMIT = 70
QUICK_LIMIT = 50


def check(c):
    import spmd_steps

    spmd_steps.measure(c, "fx")
