"""The fake accelerator: a device type of torch's for a machine that has none, built of C++ once for each torch.

`starting` gives it to the processes of a run, `building` makes the library, `registering` gives it to torch in one
process, and `device_module` is `torch.fakeacc`. These are its names, which also those know who do not use it.
"""

KIND = "fakeacc"
MASK = "FAKEACC_VISIBLE_DEVICES"
COUNT = "TORCH_TESTING_EXT_FAKE_ACCELERATORS"
# The bytes of each, and whether streams are late. A user may set them, too; the library reads them.
MEMORY = "TORCH_TESTING_EXT_FAKE_MEMORY"
LATE_STREAMS = "TORCH_TESTING_EXT_FAKE_LATE_STREAMS"
# Set by the first process of a run: the folder of the library, and the file in which processes count their memory.
LIBRARY_FOLDER = "_TORCH_TESTING_EXT_FAKE_LIBRARY"
MEMORY_FILE = "_TORCH_TESTING_EXT_FAKE_MEMORY_FILE"


def refusal(kind: str) -> str:
    """Say why there is no fake accelerator beside one of this kind."""
    return (
        f"this machine has an accelerator ({kind}), so fake ones cannot be used: leave them out, or hide the "
        "real one, as with CUDA_VISIBLE_DEVICES="
    )


def describe(count: int) -> str:
    """A line for the header of a run."""
    return f"fake accelerators: {count}, computed by the CPU"
