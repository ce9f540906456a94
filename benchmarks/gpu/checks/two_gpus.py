"""Two ranks over NCCL have a GPU each and connect; two tests with a GPU each run at the same time on different ones."""

import re

from runs import run_test

ORDER = 23
GPUS = 2
LIMIT = 60


def check(c):
    meeting = c.folder / "meeting"
    meeting.mkdir()
    environ = {"GPU_CHECK_MEETING": str(meeting), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{c.folder}/nccl.%p"}
    found = run_test(c, "test_two.py", "--timeout=60", environ=environ)
    c.expect(found.code == 0, "nothing fails", found.failures)
    for name in ("test_distinct_devices", "test_collectives", "test_persistent"):
        c.expect(found.outcomes.get(name) == "passed", f"{name} passes over NCCL", found.message(name)[:600])
    for name in ("test_first_meets", "test_second_meets"):
        c.expect(found.outcomes.get(name) == "passed", f"{name}: they ran at the same time", found.message(name)[:600])
    nothing = {"attempts": [{"devices": []}]}
    first, second = (found.tests.get(name, nothing) for name in ("test_first_meets", "test_second_meets"))
    leases = [test["attempts"][-1]["devices"] for test in (first, second)]
    c.expect(not found.idle_leases(), "each test has memory of its GPUs", found.idle_leases())
    c.expect(all(leases) and leases[0] != leases[1], "on different GPUs", leases)
    uuids = {path.read_text() for path in meeting.glob("*.uuid")}
    c.expect(len(uuids) == 2, "whose UUIDs differ", uuids)
    transports = {
        match[1] for path in c.folder.glob("nccl.*") for match in re.finditer(r" via (\S+)", path.read_text())
    }
    c.expect(transports, "NCCL's log names the transport that connects the ranks")
    c.note(f"NCCL connects the ranks via {', '.join(sorted(transports)) or '?'}")
