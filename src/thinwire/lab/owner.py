"""The owner's side of the holder: starting it, asking it, letting it go."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from typing import Any

from thinwire.errors import MissingExtraError
from thinwire.lab.mark import VARIABLE, own_mark
from thinwire.lab.results import LabError

_PATIENCE_SECONDS = 10.0


class Holder:
    """A running `thinwire.lab.holder`, which lives as long as this process does at most."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise LabError("a lab needs Linux: it is made of network namespaces")
        if importlib.util.find_spec("pyroute2") is None:
            raise MissingExtraError("pyroute2", "lab", "a lab")
        self._lock = threading.Lock()
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "thinwire.lab.holder", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env={
                **os.environ,
                # It finds what we find, wherever we found it.
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                VARIABLE: str(own_mark()),
            },
            start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, object]) -> Any:
        assert self._process.stdin is not None
        with self._lock:
            with contextlib.suppress(BrokenPipeError):  # _receive says why it broke
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            return self._receive().get("value")

    def close(self) -> None:
        """Let the holder sweep and go. Returns when all is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._complaints.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(_PATIENCE_SECONDS)
            self._complaints.seek(0)
            said = self._complaints.read().decode(errors="replace").split("\n")
            why = next((line for line in reversed(said) if line.strip()), "it said nothing")
            code = self._process.returncode
            raise LabError(f"the process that holds the lab has ended with exit code {code}: {why}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer
