"""Every rank has a launcher's variables and the right device, under each of NCCL's names that this torch has."""

from runs import run_test

ORDER = 22
LIMIT = 20


def check(c):
    found = run_test(c, "test_devices.py", "--ranks-per-gpu=2")
    c.expect(found.code == 0, "nothing fails", found.failures)
    for name in ("test_variables", "test_env_rendezvous", "test_only_the_leased_device", "test_devices_of_two_ranks"):
        c.expect(found.outcomes.get(name) == "passed", f"{name} passes", found.message(name)[:600])
    c.expect(found.outcomes.get("test_nccl") == "passed", "NCCL works in a rank", found.message("test_nccl")[:600])
    on_gpu = [one for one in found.on_gpu() if one.endswith("::test_nccl")]
    c.expect(on_gpu, "it has memory of the GPU", found.on_gpu())
    for name, outcome in found.outcomes.items():
        if name.startswith("test_nccl"):
            c.note(f"{name}: {outcome} {found.message(name)[:200]}")
