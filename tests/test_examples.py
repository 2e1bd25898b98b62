"""The examples run as their first lines say.

One of them under torchrun itself, whose ranks import torch; the others in processes that have it
already, with the environment that torchrun would give them.
"""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import ranks
import torch.distributed as dist

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.slow


def on_torchrun(arguments: tuple[str, ...], said: str) -> None:
    """Be `torchrun`, which starts its ranks as programs."""
    from torch.distributed.run import main

    dist.destroy_process_group()
    for end in (1, 2):
        os.dup2(os.open(f"{said}{end}", os.O_WRONLY | os.O_CREAT), end)
    os.environ["OMP_NUM_THREADS"] = "1"
    main(arguments)


def torchrun(processes: int, name: str, folder: Path) -> str:
    arguments = ("--standalone", "--nproc-per-node", str(processes), str(EXAMPLES / name))
    with ranks.Ranks(1) as own:
        own.start(on_torchrun, arguments, str(folder / "said"))
        (outcome,) = own.outcomes(seconds=100)
    assert not outcome.error, outcome.error + (folder / "said2").read_text()[-3000:]
    return (folder / "said1").read_text()


def on_example(name: str, arguments: tuple[str, ...], port: int) -> str:
    variables = ranks.leave_for_torchrun(port)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        for variable, value in variables.items():
            patch.setenv(variable, value)
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return said.getvalue()


def started(processes: int, name: str, *arguments: str) -> str:
    """What an example printed on all ranks."""
    port = ranks.free_port()
    return "".join(ranks.run(on_example, name, arguments, port, ranks=processes, seconds=100))


def test_all_reduce_loses_nothing(tmp_path):
    output = torchrun(2, "all_reduce.py", tmp_path)
    lost = float(output.rsplit("to ", 1)[1])
    assert lost < 1e-5  # float32 sums of 50 steps


def test_pipeline_learns():
    output = started(2, "pipeline.py")
    first, last = (float(line.rsplit(" ", 1)[1]) for line in output.strip().splitlines())
    assert last < first / 100


def test_ddp_learns_and_resumes(tmp_path):
    folder = str(tmp_path / "checkpoint")
    output = started(2, "ddp.py", "--steps", "21", "--save", folder)
    losses = re.findall(r"step (\d+): loss ([\d.]+)", output)
    assert [int(step) for step, _ in losses] == [1, 11, 21]
    assert float(losses[-1][1]) < float(losses[0][1])
    assert "topk:0.01" in output
    assert "total of 21 steps" in output
    resumed = started(2, "ddp.py", "--steps", "31", "--resume", folder)
    whole = started(2, "ddp.py", "--steps", "31")
    assert _results(resumed) == _results(whole)[-2:]
    assert re.findall(r"step (\d+): loss", resumed) == ["31"]


def test_own_loop_finds_the_answer():
    output = started(2, "own_loop.py")
    # Exact targets: gradient descent converges to float32 accuracy.
    assert float(output.rsplit(" ", 1)[1]) < 1e-5


def test_adam_update_learns():
    output = started(2, "adam_update.py", "--steps", "11", "--width", "16")
    losses = re.findall(r"step (\d+): loss ([\d.]+)", output)
    assert [int(step) for step, _ in losses] == [1, 11]
    assert float(losses[-1][1]) < float(losses[0][1])
    assert "topk:0.01|quantize:4" in output
    assert "11 optimizer steps" in output


def test_diloco_goes_on_from_the_middle_of_a_round(tmp_path):
    folder = str(tmp_path / "checkpoints")
    options = ("--method", "diloco:every=4,compressor=(quantize:4)", "--steps", "10")
    options += ("--width", "16")
    whole = started(2, "diloco.py", *options, "--save", folder, "--save-every", "6")
    assert "step 10, round 2: loss" in whole
    assert "10 optimizer steps, 3 rounds" in whole
    resumed = started(2, "diloco.py", *options, "--resume", folder)
    # The losses and the test of a training that was never stopped, to the last digit printed.
    assert _results(resumed) == _results(whole)


def _results(output: str) -> list[str]:
    return re.findall(r"(?:loss|test nll|test accuracy) [\d.]+", output)


def test_federated_uploads_less_and_learns(tmp_path):
    options = ("--rounds", "12", "--width", "4", "--hidden", "64", "--every", "6", "--steps", "10")
    output = started(1, "federated.py", *options, "--out", str(tmp_path / "accuracy.png"))
    found = re.findall(r"round (\d+): ([\d.]+) % right, ([\d.]+) MB", output)
    assert [int(number) for number, _, _ in found] == [6, 12, 6, 12]
    assert min(float(accuracy) for _, accuracy, _ in found[1::2]) > 40  # of ten classes
    before, after = (float(megabytes) for _, _, megabytes in found[1::2])
    assert before / after > 20
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_says_how_to_run_it(path):
    says = path.read_text().split('"""')[1]
    program = r"(torchrun --standalone --nproc-per-node \d+|python)"
    assert re.search(rf"^    {program} examples/{path.name}$", says, re.MULTILINE)


def test_fsdp_goes_on_with_another_number_of_ranks(tmp_path):
    folder, options = str(tmp_path / "checkpoint"), ("--width", "32")
    saved = started(2, "fsdp.py", *options, "--steps", "4", "--save", folder)
    assert "quantize:4" in saved
    assert "blocks.0 (parameters)" in saved
    resumed = started(3, "fsdp.py", *options, "--steps", "6", "--resume", folder)
    assert "total of 6 steps" in resumed
    replicated = started(
        4, "fsdp.py", *options, "--replicas", "2", "--compressor", "topk:0.1", "--steps", "3"
    )
    assert "topk:0.1" in replicated
