"""The title of a hang of two ranks names the one that does not come, with any one of the sources about it missing."""

from runs import run_test

ORDER = 46
LIMIT = 40

WITHOUT = {
    "": "nothing",
    "_without_recorder": "the flight recorder",
    "_without_status": "NCCL's status",
    "_without_stacks": "the stacks of the rank that does not come",
}


def check(c):
    found = run_test(c, "test_hang.py", "-k", "one_does_not_come", "--ranks-per-gpu=2")
    judge(c, found)
    c.note(f"over {sorted(found.backends()) or 'NCCL, on two GPUs'}")


def judge(c, found):
    for name, source in WITHOUT.items():
        test = f"test_one_does_not_come{name}"
        title = found.title(test)
        got = found.outcomes.get(test)
        c.expect(got in ("timeout", "error", "failed"), f"without {source}, the test fails", f"{got}: {title}")
        c.expect("rank 1" in title, f"without {source}, the title names rank 1", title)
        message = found.message(test)
        c.expect("all_reduce" in message, f"without {source}, it says what rank 0 waits for", message[:1500])
        if "stacks" not in source:
            c.expect("do_not_come" in message, f"without {source}, it says where rank 1 is", message[:1500])
        c.note(f"without {source}: {title}")


def on_cpu(c):
    judge(c, run_test(c, "test_hang.py", "-k", "one_does_not_come"))
