"""The examples run as their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def torchrun(ranks: int, name: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(EXAMPLES / name)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_all_reduce_loses_nothing():
    output = torchrun(2, "all_reduce.py")
    lost = float(output.rsplit("to ", 1)[1])
    assert lost < 1e-5  # float32 sums of 50 steps


def test_pipeline_learns():
    output = torchrun(2, "pipeline.py")
    first, last = (float(line.rsplit(" ", 1)[1]) for line in output.strip().splitlines())
    assert last < first / 100


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_says_how_to_run_it(path):
    assert "torchrun --standalone --nproc-per-node" in path.read_text().split('"""')[1]
