"""[DDP][test] See unreduced gradients in test_replicate_with_compiler

Problem: test_compile_cpu passes if no gradient is reduced at all. And
test_compile_cpu_no_sync never enters DDP's no_sync: `_test_compile` chooses the
context of a step, and then replaces it by a nullcontext. That test passes
nevertheless: an average of averages is the same number, and gradients are
compared only after the second step, which synchronizes.

Cause: `optimize_ddp = "python_reducer"` holds for all three models. So the eager
one, the reference, reduces by the very hooks that the compiled ones trace.

Fix: run the eager model without that setting. Its DDP is made in its first
forward, with the reducer in C++, which no compiler sees. Keep the chosen context,
and compare the gradients of the first step, too. Without synchronization each
rank has gradients of its own there; those of a model that synchronizes are an
average, and the comparison fails.

Test plan: python test/distributed/_composable/test_replicate_with_compiler.py
ReplicateTest.test_compile_cpu ReplicateTest.test_compile_cpu_no_sync
"""

import textwrap

FILE = "test/distributed/_composable/test_replicate_with_compiler.py"
METHOD = "ReplicateTest._test_compile"
# Before `with context:`, and not in one of the branches that choose it.
OVERRIDE = r"^ +context = \S+nullcontext\S*\n(?=\n* +with context:)"
# What the eager model, the first one, has for the compiled ones' context.
REFERENCE = r"^( +)contextlib\.nullcontext\(\)(?=\n +if model_idx == 0\n)"
# The condition; the loop over the parameters, which leaves it; the optimizers, which stay.
COMPARISON = r"^( +if not no_sync or [^\n]*\n)((?:.*\n)*?)(?= +for optim in optims)"


def edit(source):
    source.sub(METHOD, OVERRIDE, "")
    source.sub(METHOD, REFERENCE, r"\1torch._dynamo.config.patch(optimize_ddp=False)")
    source.sub(METHOD, COMPARISON, _comparison_first)


def _comparison_first(match):
    condition, loop = match.groups()
    indent = " " * (len(condition) - len(condition.lstrip()))
    return textwrap.indent(textwrap.dedent(loop), indent) + condition
