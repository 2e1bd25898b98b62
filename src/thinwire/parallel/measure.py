"""What a compressor leaves of each tensor, measured on the way; costs about one more encoding."""

import torch

from thinwire.compressors import Compressor, LocalCompressor
from thinwire.feedback.base import Turn
from thinwire.kernels import Key
from thinwire.reducer.unit import Unit
from thinwire.telemetry import Ledger, Line


class Measurer:
    """Notes ||p - C(p)|| / ||p|| of every tensor, p being the gradient and what was left out
    before."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __call__(self, unit: Unit, turn: Turn, compressor: Compressor, key: Key) -> None:
        if not isinstance(compressor, LocalCompressor):
            return  # only all ranks together know what it leaves
        left = None if turn.residual is None else turn.residual.clone()
        wanted = turn.tensor.to(torch.float32 if left is None else left.dtype)
        wanted = wanted.clone() if left is None else wanted + left
        payload = compressor.encode(turn.tensor, residual=left, key=key)
        if payload.non_finite:
            return
        payload.add_to(error := wanted.clone(), -1.0)
        sizes = unit.sizes
        for name, e, p in zip(
            unit.names, torch.split(error, sizes), torch.split(wanted, sizes), strict=True
        ):
            line = self._ledger.lines.setdefault(name, Line(p.numel()))
            size = float(torch.linalg.vector_norm(p))
            line.relative_error = float(torch.linalg.vector_norm(e)) / size if size else 0.0
