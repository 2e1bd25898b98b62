"""Programs of frameworks, and what they print."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT = 400  # seconds for a program: Ray alone takes one to three minutes


def torchrun(program: str, *arguments: object, ranks: int = 2) -> dict[str, Any]:
    """Run a program of this folder on several ranks; the JSON object that rank 0 printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return _run([*launcher, str(HERE / program), *map(str, arguments)])


def python(program: str, *arguments: object) -> dict[str, Any]:
    """Run a program of this folder that starts its ranks itself; the JSON object it printed."""
    return _run([str(HERE / program), *map(str, arguments)])


def _run(words: list[str]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, *words]
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=LIMIT, env=environment, check=False
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("@")]
    assert lines, f"exit code {ended.returncode}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(lines[-1][1:])
    return found


def raised(call: Callable[[], object]) -> str:
    """The error of a call, in words; empty if there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
