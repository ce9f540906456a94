"""The process of one check: `python check_process.py FILE gpu|cpu quick|full FOLDER`."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Skip(Exception):
    """The check cannot be made here."""


class Check:
    """What a check says. Everything is sent at once: a check that hangs or crashes later keeps what it has said."""

    def __init__(self, part: str, quick: bool, folder: Path):
        self.on_gpu = part == "gpu"
        self.quick = quick
        self.folder = folder  # for its files; removed at the end
        self.root = ROOT
        self.has_failed = False
        self._lines = int(os.environ.pop("GPU_CHECK_LINES"))
        os.set_inheritable(self._lines, False)

    def expect(self, holds: Any, what: str, otherwise: Any = "") -> bool:
        """Something should hold: say what, and what was found if it does not. The check goes on."""
        text = what if holds else f"{what} (found: {otherwise})" if otherwise != "" else what
        self.has_failed = self.has_failed or not holds
        self._send({"expected": text, "holds": bool(holds)})
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}", flush=True)
        return bool(holds)

    def figure(self, name: str, value: Any, unit: str = "") -> None:
        """Something was measured."""
        self._send({"figure": {"name": name, "value": value, "unit": unit}})
        print(f"{name}: {value} {unit}", flush=True)

    def note(self, text: str) -> None:
        self._send({"note": text})
        print(f"note: {text}", flush=True)

    def skip(self, why: str) -> None:
        """The check cannot be made here: end it."""
        raise Skip(why)

    def over(self, skip: str = "") -> None:
        self._send({"skip": skip, "over": True} if skip else {"over": True})

    def _send(self, line: dict[str, Any]) -> None:
        os.write(self._lines, (json.dumps(line) + "\n").encode())


def main() -> None:
    path, part, extent, folder = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    sys.path.insert(0, str(HERE))
    check = Check(part, extent == "quick", folder)
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        getattr(module, "check" if check.on_gpu else "on_cpu")(check)
        check.over()
    except Skip as skip:
        check.over(str(skip))


if __name__ == "__main__":
    main()
