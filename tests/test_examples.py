"""The examples run as their first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def torchrun(ranks: int, name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(EXAMPLES / name), *arguments]
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


def test_ddp_learns_and_resumes(tmp_path):
    folder = str(tmp_path / "checkpoint")
    output = torchrun(2, "ddp.py", "--steps", "21", "--save", folder)
    losses = re.findall(r"step (\d+): loss ([\d.]+)", output)
    assert [int(step) for step, _ in losses] == [1, 11, 21]
    assert float(losses[-1][1]) < float(losses[0][1])
    assert "topk:0.01" in output and "total of 21 steps" in output
    output = torchrun(2, "ddp.py", "--steps", "1", "--resume", folder)
    assert "step 22: loss" in output


def test_own_loop_finds_the_answer():
    output = torchrun(2, "own_loop.py")
    # Exact targets: gradient descent converges to float32 accuracy.
    assert float(output.rsplit(" ", 1)[1]) < 1e-5


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_says_how_to_run_it(path):
    assert "torchrun --standalone --nproc-per-node" in path.read_text().split('"""')[1]
