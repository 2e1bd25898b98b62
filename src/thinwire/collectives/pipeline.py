"""send and recv that autograd knows: activations go forward, their gradients come back.

# stage 0
token = tw.pipe_send(first(x), "quantize:8", dst=1)
token.backward()
# stage 1
y = tw.pipe_recv(shape, src=0, gradient="quantize:8")
criterion(second(y), target).backward()
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.point import recv, send
from thinwire.collectives.start import Group, Timeout, compressor_of
from thinwire.compressors import Compressor


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        compressor: Compressor,
        dst: int,
        residual: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.like, ctx.dst, ctx.options = torch.empty_like(x, device="meta"), dst, options
        ctx.device = x.device
        send(x, compressor, dst=dst, residual=residual, **options)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradient = torch.empty(ctx.like.shape, dtype=ctx.like.dtype, device=ctx.device)
        recv(gradient, src=ctx.dst, **ctx.options)
        return gradient, None, None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        out: Tensor,
        compressor: Compressor,
        src: int,
        residual: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.compressor, ctx.src, ctx.residual, ctx.options = compressor, src, residual, options
        recv(out, src=src, **options)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        send(gradient, ctx.compressor, dst=ctx.src, residual=ctx.residual, **ctx.options)
        return torch.zeros(()), None, None, None, None, None


def pipe_send(
    x: Tensor,
    compressor: Compressor | str,
    *,
    dst: int,
    residual: Tensor | None = None,
    group: Group = None,
    tag: int = 0,
    timeout: Timeout = None,
) -> Tensor:
    """Send activations to the next stage; the gradient comes back in the backward pass.

    Args:
        x: the activations.
        compressor: for the way forward; the receiver chooses the one for the way back.
        dst: global rank of the next stage, which calls `pipe_recv`.
        residual: what earlier sends left out (activations of different samples: usually None).
        group, tag, timeout: as for `send`.

    Returns:
        A scalar zero: ``token.backward()`` waits for the gradient and carries it on through x.
    """
    options = {"group": group, "tag": tag, "timeout": timeout}
    apply: Any = _Send.apply
    token: Tensor = apply(x, compressor_of(compressor), dst, residual, options)
    return token


def pipe_recv(
    shape: Sequence[int],
    *,
    src: int,
    gradient: Compressor | str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    gradient_residual: Tensor | None = None,
    group: Group = None,
    tag: int = 0,
    timeout: Timeout = None,
) -> Tensor:
    """Receive activations of the previous stage; the backward pass sends their gradient back.

    Args:
        shape, dtype, device: of the activations.
        src: global rank of the previous stage, which calls `pipe_send`.
        gradient: compressor for the way back.
        gradient_residual: what earlier gradients left out.
        group, tag, timeout: as for `recv`.

    Returns:
        The activations, requiring gradients.
    """
    options = {"group": group, "tag": tag, "timeout": timeout}
    anchor = torch.zeros((), requires_grad=True)
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    apply: Any = _Receive.apply
    received: Tensor = apply(anchor, out, compressor_of(gradient), src, gradient_residual, options)
    return received
