"""Leases under masks of numbers and of UUIDs; a mask that names no device is refused in one line."""

from runs import run_test

ORDER = 65
LIMIT = 20


def check(c):
    import torch

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    for name, mask in (("part of a UUID", f"GPU-{uuid[:8]}"), ("number", "0"))[: 1 if c.quick else 2]:
        folder = name.replace(" ", "_")
        environ = {"CUDA_VISIBLE_DEVICES": mask, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        found = run_test(c, "test_devices.py", "-k", "only_the_leased", name=folder, environ=environ)
        got = found.outcomes.get("test_only_the_leased_device")
        c.expect(got == "passed", f"a test leases a device under a mask with a {name}", found.text[-600:])
        devices = found.tests.get("test_only_the_leased_device", {"attempts": [{"devices": None}]})["attempts"][-1]
        c.expect(devices["devices"] == [mask], f"the lease has the name that the mask has: {name}", devices["devices"])
    environ = {"CUDA_VISIBLE_DEVICES": "GPU-00000000-0000-0000-0000-000000000000"}
    wrong = run_test(c, "test_devices.py", name="wrong", environ=environ)
    refused = wrong.code in (3, 4) and "Traceback" not in wrong.text
    c.expect(refused, "a mask that names a device that is not there is refused", f"{wrong.code}: {wrong.text[-500:]}")
