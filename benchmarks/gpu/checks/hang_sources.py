"""The title of a hang of two ranks names the one that does not come, with any one of the sources about it missing."""

from runs import run_test

ORDER = 46
GPUS = 2
LIMIT = 60

WITHOUT = {
    "nothing": {},
    "the flight recorder": {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
    "NCCL's status": {"NCCL_RAS_ENABLE": "0"},
}


def check(c):
    for source, environ in WITHOUT.items():
        name = source.replace(" ", "_").replace("'", "")
        found = run_test(c, "test_hang.py", "-k", "one_does_not_come", name=name, environ=environ)
        message = found.message("test_one_does_not_come")
        title = message.strip().partition("\n")[0]
        c.expect("rank 1" in title, f"without {source}, the title names rank 1", title)
        c.note(f"without {source}: {title}")
