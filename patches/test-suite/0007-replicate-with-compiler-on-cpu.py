"""[DDP][test] Run the CPU tests of test_replicate_with_compiler without GPUs

Problem: without a GPU, test_compile_cpu, test_compile_cpu_no_sync and the two
tests of buckets pass, and run nothing. With one GPU, they run in a single rank,
whose gradients need no reduction.

Cause: world_size is the number of GPUs, at most two. Without GPUs there are no
ranks, which counts as a pass.

Fix: always use two ranks. These four tests use gloo and the CPU. The others say
by skip_if_lt_x_gpu that they need two GPUs.

Test plan: CUDA_VISIBLE_DEVICES= python
test/distributed/_composable/test_replicate_with_compiler.py ReplicateTest
With a compiled replicate that does not reduce, test_compile_cpu now fails.
"""

FILE = "test/distributed/_composable/test_replicate_with_compiler.py"
CLASS = "ReplicateTest"
NOTE = r"^ +# TODO: consider using all devices.*\n( +#.*\n)*"


def edit(source):
    if source.has(CLASS, NOTE):
        source.sub(CLASS, NOTE, "")
    source.sub(f"{CLASS}.world_size", r"return min\(2, .*\)$", "return 2")
