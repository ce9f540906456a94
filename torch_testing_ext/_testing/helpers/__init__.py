"""Helpers of tests: equality, expectations, context managers, and PyTorch's small helpers.

They know nothing of ranks, bases or marks.

    equality               what `assertEqual` compares
    expectations           `assertExpected`: texts in files, and how they are accepted
    contexts               settings and files, restored at the end
    backend_settings       precision of float32, preferred libraries
    function_runs          ways to run a function or a test
    small_helpers          names that tests import from common_utils
    suite_checks           what several distributed suites share
    checkpoint_decorators  decorators for tests of checkpoints
    stores_and_folders     stores, gloo devices, shared folders
"""
