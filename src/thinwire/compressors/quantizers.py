"""Quantizers: evenly spaced levels, or powers of two, in few bits."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import check, kernels
from thinwire.compressors.base import Encoded, LocalCompressor, Request
from thinwire.frames.code import Extent
from thinwire.frames.levels import BIAS, Affine, Elias, Powers, Uniform, fit
from thinwire.kernels import Key
from thinwire.spec import Bits

TRITS = 0
TINY = {4: 2.0**-118, 8: 2.0**-800}  # by the bytes of an element: below it, levels are all zero


def peak_of(request: Request) -> float | None:
    """max |x + r|; None if not finite throughout."""
    extent = kernels.on(request.x.device).extent(request.x, request.r)
    return None if extent is None else max(-extent[0], extent[1])


def is_tiny(request: Request, peak: float) -> bool:
    """Whether a scale for such a peak would leave the range of normal numbers."""
    return peak < TINY[request.real.itemsize]


def encode_uniform(
    request: Request,
    *,
    limit: int,
    width: int,
    block: int | None,
    rule: str,
    scale: float = 0.0,
    key: Key | None = None,
    entropy: bool = False,
) -> Encoded | None:
    """Levels -limit..limit; see the kernel for the rest. Entropy-coded where that is smaller."""
    kernel = kernels.on(request.x.device)

    def levels(bits: int) -> tuple[Tensor, ...] | None:
        found: tuple[Tensor, ...] | None = kernel.encode_uniform(
            request.x,
            request.r,
            limit=limit,
            width=bits,
            block=fit(block, request.numel),
            rule=rule,
            scale=scale,
            key=key,
        )
        return found

    if entropy:
        loose = levels(8)
        if loose is None:
            return None
        scales, data = loose
        unary, words = kernel.elias_encode(data, limit)
        if words.numel() * 8 < request.numel * width // 8:
            code = Elias(limit, block or 0, unary, words.numel() - unary)
            return Encoded(code, (scales, words), (scales, data))
    packed = levels(width)
    return None if packed is None else Encoded(Uniform(width, limit, block or 0), packed)


@dataclass(frozen=True)
class Quantize(LocalCompressor):
    """Evenly spaced levels of 8, 4 or 2 bits.

    Symmetric: scale = max|x| / (2^(bits-1) - 1), level = round(x / scale), value = level * scale.
    Affine: scale = (max - min) / (2^bits - 1), level = round((x - min) / scale), value =
    level * scale + min. The error is at most scale/2 (scale when stochastic, which is unbiased).
    A block whose largest magnitude is under 2^-118 (float64: 2^-800) is sent as zeros.

    Args:
        bits: 8, 4 or 2 per element.
        block: elements that share a scale, a multiple of 8; None for the whole tensor.
        symmetric: around zero; False stores the minimum too and uses every level.
        stochastic: round up or down at random, so that the mean is exact.
        entropy: code levels by their frequency where that is smaller (symmetric only; slower).

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.Quantize(8, block=None, symmetric=False)
        >>> c.decode(c.encode(torch.tensor([0.0, 0.4, 255.0])))
        tensor([  0.,   0., 255.])

    Reference: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2015.
    """

    bits: int
    block: int | None = 256
    symmetric: bool = True
    stochastic: bool = False
    entropy: bool = False
    name: ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        if isinstance(self.bits, Bits):
            object.__setattr__(self, "bits", self.bits.count)
        check.one_of("Quantize", "bits", self.bits, (8, 4, 2))
        check.block("Quantize", "block", self.block)
        check.flag("Quantize", "symmetric", self.symmetric)
        check.flag("Quantize", "stochastic", self.stochastic)
        check.flag("Quantize", "entropy", self.entropy)
        if self.entropy and not self.symmetric:
            raise ValueError("Quantize: entropy=True needs symmetric=True (levels around zero)")

    @property
    def random(self) -> bool:
        return self.stochastic

    @property
    def grain(self) -> int | None:
        return self.block

    @property
    def _code(self) -> Uniform | Affine:
        """What is written unless entropy coding is shorter."""
        if self.symmetric:
            return Uniform(self.bits, (1 << (self.bits - 1)) - 1, self.block or 0)
        return Affine(self.bits, self.block or 0)

    def max_section_bytes(self, extent: Extent) -> int:
        return self._code.section_bytes(extent)

    def encode_flat(self, request: Request) -> Encoded | None:
        return self._symmetric(request) if self.symmetric else self._affine(request)

    def _symmetric(self, request: Request) -> Encoded | None:
        limit = (1 << (self.bits - 1)) - 1
        rule, scale = "max", 0.0
        if self.block is None:
            peak = peak_of(request)
            if peak is None:
                return None
            rule, scale = "given", 0.0 if is_tiny(request, peak) else peak / limit
        return encode_uniform(
            request,
            limit=limit,
            width=self.bits,
            block=self.block,
            rule=rule,
            scale=scale,
            key=request.key if self.stochastic else None,
            entropy=self.entropy,
        )

    def _affine(self, request: Request) -> Encoded | None:
        kernel = kernels.on(request.x.device)
        extent = None
        if self.block is None:
            extent = kernel.extent(request.x, request.r)
            if extent is None:
                return None
        sections = kernel.encode_affine(
            request.x,
            request.r,
            width=self.bits,
            block=fit(self.block, request.numel),
            extent=extent,
            key=request.key if self.stochastic else None,
        )
        return None if sections is None else Encoded(Affine(self.bits, self.block or 0), sections)


@dataclass(frozen=True)
class QSGD(LocalCompressor):
    """Stochastic levels of the norm.

    In each bucket of n elements, with s levels: l = floor(s|v|/norm), one more with the probability
    of the fraction; value = norm * sign(v) * l / s. Unbiased, and with the L2 norm
    E||Q(v) - v||^2 <= min(n/s^2, sqrt(n)/s) ||v||^2.

    Args:
        levels: s, from 1 to 127; fewer send less. Packed into ceil(log2(2s + 1)) bits. In a spec
            also as bits: "qsgd:4" has 4 levels, "qsgd:4bit" the 7 that 4 bits can hold.
        bucket: elements that share a norm, a multiple of 8; None for the whole tensor.
        norm: "l2" as in the paper, or "max", which has a smaller error at the same bits.
        entropy: Elias-code the levels, as the paper does, where that is smaller (slower).

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.QSGD(4, norm="max")
        >>> c.decode(c.encode(torch.tensor([4.0, -2.0, 0.0]), key=tw.Key(1)))
        tensor([ 4., -2.,  0.])

    Reference: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding, 2017.
    """

    levels: int
    bucket: int | None = 512
    norm: str = "l2"
    entropy: bool = False
    name: ClassVar[str] = "qsgd"

    def __post_init__(self) -> None:
        if isinstance(self.levels, Bits):
            object.__setattr__(self, "levels", levels_of(self.levels.count))
        if not check.is_whole(self.levels) or not 1 <= self.levels <= 127:
            raise ValueError(
                "QSGD: levels must be an integer in [1, 127], or bits as in '4bit' (7 levels), "
                f"got {self.levels!r}"
            )
        check.block("QSGD", "bucket", self.bucket)
        check.one_of("QSGD", "norm", self.norm, ("l2", "max"))
        check.flag("QSGD", "entropy", self.entropy)

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def random(self) -> bool:
        return True

    @property
    def grain(self) -> int | None:
        return self.bucket

    def max_section_bytes(self, extent: Extent) -> int:
        width = (2 * self.levels).bit_length()
        return Uniform(width, self.levels, self.bucket or 0).section_bytes(extent)

    def encode_flat(self, request: Request) -> Encoded | None:
        rule, scale = self.norm, 0.0
        if self.bucket is None:
            norm = self._whole_norm(request)
            if norm is None:
                return None
            rule, scale = "given", norm / self.levels
        return encode_uniform(
            request,
            limit=self.levels,
            width=(2 * self.levels).bit_length(),
            block=self.bucket,
            rule=rule,
            scale=scale,
            key=request.key,
            entropy=self.entropy,
        )

    def _whole_norm(self, request: Request) -> float | None:
        peak = peak_of(request)
        if peak is None or is_tiny(request, peak):
            return None if peak is None else 0.0
        if self.norm == "max":
            return peak
        x = request.x
        _, mean_square = kernels.on(x.device).moments(x, request.r, 1 / peak)
        # Any bound of all magnitudes is a valid norm, so one that overflows is cut.
        top = 3.4e38 if request.real.itemsize == 4 else 1.7e308
        return min(peak * math.sqrt(mean_square * request.numel), top)


def levels_of(bits: int) -> int:
    """The most levels of QSGD that fit so many bits, with their signs.

    >>> [levels_of(bits) for bits in (2, 4, 8)]
    [1, 7, 127]
    """
    if not check.is_whole(bits) or not 2 <= bits <= 8:
        raise ValueError(f"QSGD: bits must be an integer in [2, 8], got {bits!r}")
    return int(2 ** (bits - 1) - 1)


@dataclass(frozen=True)
class TernGrad(LocalCompressor):
    """Minus one, zero or one times a scale, at random.

    x is clipped at clip * sigma, s = max|x| after that, value = s * sign(x) with probability
    |x| / s, else 0. Five elements go into a byte. sigma is the root mean square (gradients have a
    mean near zero; a constant tensor then still has something to send).

    It is right on average except for what clipping takes away: with the default 5 % of the norm of
    normal numbers, 17 % of Laplace, some 40 % and more of heavy-tailed ones. Its error is about as
    large as x (without clipping 1.6 times as large for 100,000 normal numbers, and more with more
    of them), so a residual would grow from step to step: "auto" feedback remembers nothing.

    Args:
        clip: in units of sigma; smaller has less variance and more bias. None for no clipping,
            which is unbiased.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.TernGrad()
        >>> c.decode(c.encode(torch.tensor([2.0, -2.0, 0.0])))
        tensor([ 2., -2.,  0.])

    Reference: Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
    Learning, 2017.
    """

    clip: float | None = 2.5
    name: ClassVar[str] = "terngrad"

    def __post_init__(self) -> None:
        if self.clip is None:
            return
        if not check.is_number(self.clip) or not self.clip > 0:
            raise ValueError(f"TernGrad: clip must be positive, or None, got {self.clip!r}")
        object.__setattr__(self, "clip", float(self.clip))

    @property
    def unbiased(self) -> bool:
        return self.clip is None

    @property
    def wants_residual(self) -> bool:
        return False

    @property
    def random(self) -> bool:
        return True

    def max_section_bytes(self, extent: Extent) -> int:
        return Uniform(TRITS, 1, 0).section_bytes(extent)

    def encode_flat(self, request: Request) -> Encoded | None:
        scale = peak_of(request)
        if scale is None:
            return None
        if is_tiny(request, scale):
            scale = 0.0
        elif self.clip is not None:
            x = request.x
            _, mean_square = kernels.on(x.device).moments(x, request.r, 1 / scale)
            scale *= min(1.0, self.clip * math.sqrt(mean_square))
        return encode_uniform(
            request, limit=1, width=TRITS, block=None, rule="given", scale=scale, key=request.key
        )


@dataclass(frozen=True)
class Natural(LocalCompressor):
    """The nearest powers of two, at random.

    |x| between 2^e and 2^(e+1) becomes the upper one with probability |x|/2^e - 1: unbiased, and
    E||C(x)||^2 <= 9/8 ||x||^2. A byte per element: the sign and the exponent in a window of 127
    below the tensor's largest; what is smaller becomes the window's lowest power or zero, unbiased
    too.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.Natural()
        >>> c.decode(c.encode(torch.tensor([0.5, -4.0, 0.0])))
        tensor([ 0.5000, -4.0000,  0.0000])

    Reference: Horvath et al., Natural Compression for Distributed Deep Learning, 2019.
    """

    name: ClassVar[str] = "natural"

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def random(self) -> bool:
        return True

    def max_section_bytes(self, extent: Extent) -> int:
        return Powers(BIAS).section_bytes(extent)

    def encode_flat(self, request: Request) -> Encoded | None:
        peak = peak_of(request)
        if peak is None:
            return None
        x = request.x
        if is_tiny(request, peak):
            return Encoded(Powers(BIAS), (torch.zeros_like(x, dtype=torch.uint8),))
        top = math.frexp(peak)[1]
        codes = kernels.on(x.device).encode_powers(x, request.r, top=top, key=request.key)
        return Encoded(Powers(top + BIAS), (codes,))
