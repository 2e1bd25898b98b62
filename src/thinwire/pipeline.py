"""send and recv that autograd knows: activations go forward, their gradients come back.

# stage 0
token = tw.pipeline.send(first(x), "quantize:8", dst=1)
token.backward()
# stage 1
y = tw.pipeline.recv(shape, src=0, grad_compressor="quantize:8")
criterion(second(y), target).backward()
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.handle import Handle, wait_all
from thinwire.collectives.options import Group, Timeout
from thinwire.collectives.send_recv import irecv, isend
from thinwire.compressors import Compressor, compressor_of

_lock = threading.Lock()
_under_way: list[Handle] = []


class _Send(torch.autograd.Function):
    """The anchor makes backward() run for activations that need no gradient, too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        compressor: Compressor,
        dst: int,
        residual: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.shape, ctx.kind = x.shape, {"dtype": x.dtype, "device": x.device}
        ctx.dst, ctx.options = dst, options
        ctx.handle = _start(x, compressor, dst, residual, options)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        _finish(ctx.handle)
        gradient = torch.empty(ctx.shape, **ctx.kind)
        irecv(gradient, src=ctx.dst, **ctx.options).wait()
        return gradient, torch.zeros(()), None, None, None, None


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
        ctx.mark_dirty(out)
        ctx.compressor, ctx.src, ctx.residual, ctx.options = compressor, src, residual, options
        irecv(out, src=src, **options).wait()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        _start(gradient, ctx.compressor, ctx.src, ctx.residual, ctx.options)
        return torch.zeros(()), None, None, None, None, None


def _start(
    x: Tensor, compressor: Compressor, to: int, residual: Tensor | None, options: dict[str, Any]
) -> Handle:
    """Send a copy in the background: stages that wait for their sends would wait for each other."""
    handle = isend(x.detach().clone(), compressor, dst=to, residual=residual, **options)
    with _lock:
        ended = [each for each in _under_way if each.is_completed()]
        _under_way[:] = [each for each in _under_way if not each.is_completed()]
        _under_way.append(handle)
    wait_all(ended)  # raises the error of an earlier send, if there was one
    return handle


def _finish(handle: Handle) -> None:
    """Wait for one send; its error is raised here and nowhere else."""
    with _lock:
        if handle in _under_way:
            _under_way.remove(handle)
    handle.wait()


def wait() -> None:
    """Return when everything that `send` and backward passes have sent has arrived.

    Raises the first error among them. For the end of training, and before residuals are read.
    """
    with _lock:
        handles = list(_under_way)
        _under_way.clear()
    wait_all(handles)


def send(
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

    The activations are copied and sent in the background, so micro-batches may be in flight in any
    order that the next stage receives them in. An error shows in the backward pass, in the next
    send, or in `wait`.

    Args:
        x: the activations.
        compressor: for the way forward; the receiver chooses the one for the way back.
        dst: global rank of the next stage, which calls `recv`.
        residual: what earlier sends left out (activations of different samples: usually None).
        group, tag, timeout: as for `send`.

    Returns:
        A scalar zero: ``token.backward()`` waits for the gradient and carries it on through x.
    """
    options = {"group": group, "tag": tag, "timeout": timeout}
    anchor = torch.zeros((), requires_grad=True)
    apply: Any = _Send.apply
    token: Tensor = apply(x, anchor, compressor_of(compressor), dst, residual, options)
    return token


def recv(
    shape: Sequence[int],
    *,
    src: int,
    grad_compressor: Compressor | str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    grad_residual: Tensor | None = None,
    group: Group = None,
    tag: int = 0,
    timeout: Timeout = None,
) -> Tensor:
    """Receive activations of the previous stage; the backward pass sends their gradient back.

    Args:
        shape, dtype, device: of the activations.
        src: global rank of the previous stage, which calls `send`.
        grad_compressor: for the way back.
        grad_residual: what earlier gradients left out.
        group, tag, timeout: as for `recv`.

    Returns:
        The activations, requiring gradients.
    """
    options = {"group": group, "tag": tag, "timeout": timeout}
    anchor = torch.zeros((), requires_grad=True)
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    apply: Any = _Receive.apply
    received: Tensor = apply(
        anchor, out, compressor_of(grad_compressor), src, grad_residual, options
    )
    return received
