"""An extension of the storage of checkpoints, for tests of extensions. Imports torch.distributed.checkpoint."""

from __future__ import annotations

import io
from typing import IO, Any, cast

from torch_testing_ext._torch import fsdp_parts

# Keeps these frames out of tracebacks.
__unittest = True


class Rot13Example(fsdp_parts.stream_extension_class()):  # type: ignore[misc]
    """Swaps the case of the ASCII letters in what it writes, and back in what it reads, as PyTorch's does."""

    def __init__(self, chunk_size: int = io.DEFAULT_BUFFER_SIZE) -> None:
        super().__init__()
        self._chunk_size = chunk_size

    @staticmethod
    def from_descriptor(version: str) -> Rot13Example:
        if version.partition(".")[0] != "1":
            raise ValueError(f"Unknown extension {version=}")
        return Rot13Example()

    @staticmethod
    def registry_name() -> str:
        return "stream.rot13"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return cast(IO[bytes], _SwappingWriter(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return cast(IO[bytes], _SwappingReader(input))


class _SwappingWriter(io.RawIOBase):
    """Writes to a stream, which stays open, with cases swapped."""

    def __init__(self, output: IO[bytes]) -> None:
        self.output = output

    def writable(self) -> bool:
        return True

    def write(self, b: Any) -> int | None:
        return self.output.write(bytes(b).swapcase())

    def flush(self) -> None:
        self.output.flush()


class _SwappingReader(io.RawIOBase):
    """Reads from a stream with cases swapped."""

    def __init__(self, input: IO[bytes]) -> None:
        self.input = input

    def readable(self) -> bool:
        return True

    def readinto(self, b: Any) -> int | None:
        read = self.input.read(len(b))
        if read is None:
            return None
        b[: len(read)] = read.swapcase()
        return len(read)

    def seekable(self) -> bool:
        return self.input.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.input.seek(offset, whence)

    def tell(self) -> int:
        return self.input.tell()


def get_test_extension_registry() -> Any:
    """Return a table of extensions with `Rot13Example`."""
    registry = fsdp_parts.new_extension_registry()
    registry.register(Rot13Example)
    return registry
