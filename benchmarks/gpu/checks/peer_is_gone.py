"""What an operation of NCCL does when a peer is gone, and whether the other rank goes on: two ranks, really killed."""

from runs import run_test

ORDER = 33
GPUS = 2
LIMIT = 120
# By test of the project: the row of the table in docs/guides/faults.md.
ROWS = {
    "test_all_reduce": "a collective that needs the lost rank",
    "test_broadcast": "`broadcast` from another rank",
    "test_message": "a message to the lost rank",
    "test_stopped": "a collective, when the rank is stopped",
    "test_abort_and_new_world": "an abort and a new world of the others",
}


def check(c):
    told = c.folder / "told"
    told.mkdir(exist_ok=True)
    found = run_test(c, "test_gone.py", "--timeout=60", environ={"GPU_CHECK_TOLD": str(told)})
    for name, row in ROWS.items():
        c.expect(found.outcomes.get(name) == "passed", f"{row}: the fault happens", found.message(name)[:600])
        seen = (told / name).read_text() if (told / name).exists() else "nothing"
        c.note(f"{row}: {seen}")
