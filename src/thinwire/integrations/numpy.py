"""Arrays in, bytes out: for federated learning and parameter servers without tensors.

Example:
    >>> import numpy as np, thinwire as tw
    >>> update, residual = np.ones((100, 100), np.float32), np.zeros((100, 100), np.float32)
    >>> frame = tw.numpy.encode(update, "topk:0.01|quantize:4", residual=residual)
    >>> type(frame), len(frame) < 400
    (<class 'bytes'>, True)
    >>> restored = tw.numpy.decode(frame)
    >>> bool(np.allclose(restored + residual, update))
    True
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.compressors import Compressor, local_of
from thinwire.frames import decode as decode_tensor
from thinwire.frames import pack
from thinwire.kernels import Key

__all__ = ["decode", "encode"]

Array = NDArray[Any]


def encode(
    array: Array,
    compressor: Compressor | str,
    *,
    residual: Array | None = None,
    key: Key | None = None,
) -> bytes:
    """A frame of an array, which `decode` reads with nothing else.

    Args:
        array: floating-point numbers of any shape (lossless compressors take integers too). It is
            not changed.
        compressor: one, or its spec.
        residual: of the array's shape, float32 (float64 for float64): what earlier calls left out.
            It is added first, and in the end holds what was not sent. Start with zeros.
        key: (seed, step, tensor) for compressors that draw random numbers.
    """
    payload = local_of(compressor).encode(array, residual=residual, key=key)
    frame: Array = pack(payload).numpy()
    return frame.tobytes()


def decode(frame: bytes | bytearray | memoryview) -> Array:
    """The array of a frame; bfloat16, which NumPy has not, as float32.

    Raises:
        FrameError: these bytes are not a frame. Nothing else happens, whoever they come from.
    """
    buffer = np.frombuffer(frame, dtype=np.uint8)
    tensor = decode_tensor(torch.from_numpy(buffer.copy()))
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    found: Array = tensor.numpy()
    return found
