"""One of the two processes of `thinwire selftest`: python -m ...selftest_rank BACKEND DEVICE

Prints a line of JSON at its end: for each compressor what is wrong, "" if nothing. Started as
torchrun would, with RANK and the others in the environment.
"""

import json
import os
import sys
from typing import Any

COMPRESSORS = (
    *("none", "cast:fp8", "quantize:8", "quantize:4,stochastic=true", "onebit", "natural"),
    *("topk:0.01", "topk:0.03125,chunk=4096", "randomk:0.1,shared=true", "topk:0.1|quantize:4"),
)
NUMEL = 100_003


def main() -> None:
    backend, kind = sys.argv[1:]
    import torch
    import torch.distributed as dist

    device = torch.device(kind)
    if kind == "cuda":  # over gloo the two may share a GPU
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        found = [_try(spec, device) for spec in COMPRESSORS]
    finally:
        dist.destroy_process_group()
    print(json.dumps(found))


def _try(spec: str, device: Any) -> dict[str, str]:
    """One exchange, and what all ranks must find: the same bits, and nothing lost."""
    import torch
    import torch.distributed as dist

    from thinwire.collectives import all_reduce
    from thinwire.kernels import contract, reference

    rank, size = dist.get_rank(), dist.get_world_size()
    every = [contract.numbers(NUMEL, torch.float32, device, salt) for salt in range(size)]
    out, residual = every[rank].clone(), torch.zeros(NUMEL, device=device)
    handle = all_reduce(out, spec, residual=residual)
    wrong = ""
    mine = torch.tensor([_signed(reference.checksum(out.view(torch.uint8)))], device=device)
    sums = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(sums, mine)
    if len({int(each) for each in sums}) != 1:
        wrong = "the ranks hold different bits"
    kept = residual.double()
    dist.all_reduce(kept)
    # What was sent and what was kept make up the sum. Numbers are below 1, the sum of two below 2
    # and what two residuals hold below 4: a few roundings of float32 at that size, 2^-22 each.
    error = float((out.double() + kept - sum(each.double() for each in every)).abs().max())
    if not error <= 8 * 2.0**-22:
        wrong = wrong or f"what was sent and what was kept differ from the sum by {error:.3g}"
    return {"compressor": spec, "collective": handle.collective, "wrong": wrong}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


if __name__ == "__main__":
    main()
