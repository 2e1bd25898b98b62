"""Programs of frameworks under torchrun, and what they print."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT = 240  # seconds for a program


def torchrun(program: str, *arguments: object, ranks: int = 2) -> dict[str, Any]:
    """Run a program of this folder on several ranks; the JSON object that rank 0 printed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(ranks), str(HERE / program), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=LIMIT, env=environment, check=False
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("@")]
    assert lines, f"exit code {ended.returncode}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(lines[-1][1:])
    return found
