"""The debugger of an editor, debugpy, stops in each rank: what VS Code does, by the same protocol."""

import importlib.util
import json
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

import pytest
from kit.files import FolderCase, subject
from kit.processes import ROOT, clean_environ, end

from torch_testing_ext.common_utils import run_tests

TESTS = subject(__file__, "failing_lines.py")
DEBUGGER = (sys.executable, "-Xfrozen_modules=off", "-m", "debugpy", "--listen")
LINES = [number for number, line in enumerate(TESTS.splitlines(), 1) if "assert" in line]


class Session:
    """The editor's side of one process that is debugged; it asks where that stops, and lets it go on."""

    def __init__(self, editor, port, attach):
        self._editor, self._attach = editor, attach
        self._socket = socket.create_connection(("127.0.0.1", port))
        editor.addCleanup(self._socket.close)
        self._request("initialize", adapterID="a test", pathFormat="path")
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        editor.addCleanup(self._reader.join)
        editor.addCleanup(self._socket.shutdown, socket.SHUT_RDWR)

    def _request(self, command, **arguments):
        text = json.dumps({"seq": 1, "type": "request", "command": command, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(text) + text)

    def _read(self):
        with self._socket.makefile("rb") as stream:
            while length := stream.readline():
                stream.readline()
                message = json.loads(stream.read(int(length.partition(b":")[2])))
                self._on_message(message.get("event") or message["command"], message.get("body") or {})

    def _on_message(self, what, body):
        match what:
            case "initialize":
                self._request("attach", **self._attach)
            case "initialized":
                breakpoints = [{"line": line} for line in LINES]
                self._request("setBreakpoints", source={"path": self._editor.path}, breakpoints=breakpoints)
                self._request("configurationDone")
            case "debugpyAttach":  # a child process
                Session(self._editor, body["connect"]["port"], body)
            case "stopped":
                self._thread = body["threadId"]
                self._request("stackTrace", threadId=self._thread, levels=1)
            case "stackTrace":
                self._request("evaluate", expression="here", frameId=body["stackFrames"][0]["id"])
            case "evaluate":
                self._editor.stops.put(body["result"])
                self._request("continue", threadId=self._thread)


@unittest.skipUnless(importlib.util.find_spec("debugpy"), "debugpy is not installed")
class EditorTest(FolderCase):
    @pytest.mark.slow
    def test_breakpoints(self):
        """In a new interpreter, since the debugger starts with it."""
        self.path = str(self.write("test_x.py", TESTS))
        self.stops = queue.SimpleQueue()
        endpoints = self.root / "endpoints.json"  # the adapter writes it when it can be asked, and not before
        with open(self.root / "output", "w+") as output:
            process = subprocess.Popen(
                [*DEBUGGER, "127.0.0.1:0", "--wait-for-client", "-m", "pytest", "-q", self.path],
                cwd=self.root,
                env=clean_environ(PYTHONPATH=str(ROOT), DEBUGPY_ADAPTER_ENDPOINTS=str(endpoints)),
                stdout=output,
                stderr=output,
            )
            self.addCleanup(end, process)
            while process.poll() is None and not (endpoints.exists() and endpoints.read_text().endswith("\n")):
                time.sleep(0.01)
            if process.poll() is None:
                port = json.loads(endpoints.read_text())["client"]["port"]
                Session(self, port, {"justMyCode": True, "subProcess": True})
            code = process.wait()
            output.seek(0)
            self.assertEqual(code, 0, output.read())
        stops = sorted(self.stops.get_nowait() for _ in range(self.stops.qsize()))
        self.assertEqual(stops, ["'base 0'", "'base 1'", "'marked 0'", "'marked 1'"])

    def test_the_page(self):
        """The example for VS Code can be read, and starts what the test above starts."""
        (text,) = re.findall(r"```json\n(.*?)```", Path(ROOT, "docs/guides/editors.md").read_text(), re.S)
        first, second = json.loads(text)["configurations"]
        self.assertEqual((first["module"], first["args"], first["subProcess"]), ("pytest", ["${file}"], True))
        self.assertEqual((second["module"], second["args"]), ("torch_testing_ext", ["--warm", "${file}"]))


if __name__ == "__main__":
    run_tests()
