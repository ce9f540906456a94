"""Change torch as a future release might, and see which tests notice, those of `_torch` left out.

    python benchmarks/torch_changes.py build/torch_changes.tsv [CHANGE ...]

The changes are those of `test/torch_testing_ext/_torch/mutations.py`, each of which turns a contract red. Here each
is made in every interpreter that the tests start, by a `sitecustomize` of their own, and the files of tests that are
nearest to it run. A file that also fails when nothing changes does not count. The command goes on where it was stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "test" / "torch_testing_ext"
# Seconds for a file.
LIMIT = 400

SANITIZED = ("_collectives/test_sanitized_sound.py", "_collectives/test_planted_sanitized.py")
RECORDS = ("_collectives/records", "_collectives/test_planted_faults.py", "_collectives/test_no_false_alarms.py")
BLOCKED = ("_collectives/blocked", "_collectives/test_told.py", "launch/test_hangs.py")
CAUSES = ("launch/test_causes.py", "launch/test_hangs.py")
CREATION = ("_testing/bases/test_group_creation.py", "_testing/bases/test_stores_and_groups.py")
TRAINING = ("_spmd/test_averaging.py", "_spmd/test_refusals.py")
WORLDS = ("_testing/bases/test_whole_worlds.py", "_testing/bases/test_tests_in_worlds.py")
MESSAGES = ("_collectives/test_left_over.py", "_collectives/test_planted_faults.py", "_collectives/test_told.py")
# The files that are nearest to what depends on a contract.
NEAREST: Mapping[str, Sequence[str]] = {
    "test_arguments_of_operations": SANITIZED,
    "test_async_op_before_timeout": SANITIZED,
    "test_no_other_operations": SANITIZED,
    "test_numbers_of_reduce_operations": SANITIZED,
    "test_private_names": SANITIZED,
    "test_votes_of_pipelines": SANITIZED,
    "test_functions_of_join": SANITIZED,
    "test_arguments_that_say_parts": SANITIZED,
    "test_frames_of_ddp": (*WORLDS, SANITIZED[0]),
    "test_frames_of_checkpoints": WORLDS,
    "test_differences_go_through_one_function": WORLDS,
    "test_keys_of_the_recorder": RECORDS,
    "test_values_of_the_recorder": RECORDS,
    "test_types_of_operations": MESSAGES,
    "test_arguments_of_messages": MESSAGES,
    "test_threads_of_gloo": BLOCKED,
    "test_thread_of_a_store": BLOCKED,
    "test_text_of_a_timeout": CAUSES,
    "test_text_of_a_lost_peer": CAUSES,
    "test_text_of_a_port_in_use": (*CAUSES, CREATION[1]),
    "test_texts_of_dtensor": ("_testing/sharded",),
    "test_arguments_of_creation": CREATION,
    "test_creation_goes_through_one_function": CREATION,
    "test_errors_are_logged": CAUSES,
    "test_zero_grad": TRAINING,
    "test_optimizers": TRAINING,
    "test_tensors_of_ddp": ("_collectives/findings/test_diverged_replicas.py", "_collectives/test_planted_faults.py"),
    "test_name_of_torchrun": ("launch/launched",),
    "test_frame_of_a_module": ("_pytest_ranks/test_traffic.py",),
    "test_functions_that_learn_shapes": ("layouts/test_layout_checks.py",),
}
SHIM = "import mutations\n"


def fails(tests: str, change: str, shim: Path) -> str:
    """The first test that fails with a change, or "" if none does."""
    path = os.pathsep.join(map(str, (shim, TESTS / "_torch", ROOT)))
    environ = {**os.environ, "MUTATION": change, "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:xdist", tests]
    try:
        result = subprocess.run(command, cwd=TESTS, env=environ, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "the time was over"
    if result.returncode in (0, 5):
        return ""
    lines = [line for line in result.stdout.splitlines() if line.startswith(("FAILED ", "ERROR ", "SUBFAILED"))]
    return lines[0].split(" - ")[0] if lines else f"pytest ended with {result.returncode}"


def main(words: Sequence[str]) -> None:
    """Add a row for each change to the file: the change, its contract, and what noticed it."""
    rows = Path(words[0])
    sys.path.insert(0, str(TESTS / "_torch"))
    from mutations import MUTATIONS

    done = {line.partition("\t")[0] for line in rows.read_text().splitlines()} if rows.exists() else set()
    without: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, rows.open("a", buffering=1) as file:
        Path(folder, "sitecustomize.py").write_text(SHIM)
        for change in words[1:] or MUTATIONS:
            if change in done:
                continue
            _, contract, _ = MUTATIONS[change]
            noticed = ""
            for each in NEAREST[contract]:
                if each not in without:
                    without[each] = fails(each, "", Path(folder))
                if not (noticed or without[each]):
                    noticed = fails(each, change, Path(folder))
            file.write(f"{change}\t{contract}\t{noticed or 'not noticed'}\n")
    for each in filter(without.get, without):
        print(f"also fails without a change, and did not count: {each}: {without[each]}")


if __name__ == "__main__":
    main(sys.argv[1:])
