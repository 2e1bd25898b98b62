"""A run's settings, read and checked."""

from typing import NamedTuple

from thinwire.bench import files
from thinwire.bench.settings import EAGER_ROUNDS, SettingError, Settings
from thinwire.bench.source import Source
from thinwire.compressors import LocalCompressor, local_of
from thinwire.machine import available_bytes


class Plan(NamedTuple):
    settings: Settings
    compressors: list[LocalCompressor]
    sources: list[Source]

    @property
    def eager_rounds(self) -> int:
        return min(self.settings.rounds, EAGER_ROUNDS) if self.settings.eager else 0

    @property
    def num_steps(self) -> int:
        """Of `run`: for every compressor and tensor a warm-up, size and error, rounds, memory."""
        each = 3 + self.settings.rounds + self.eager_rounds
        return len(self.sources) * len(self.compressors) * each


def prepare(settings: Settings) -> Plan:
    """Read the settings. Raises SettingError and MissingExtraError."""
    try:
        found = {str(compressor): compressor for compressor in map(local_of, settings.compressors)}
    except (TypeError, ValueError) as error:
        raise SettingError(str(error)) from None
    if settings.input is None:
        sources = [Source(kind, size) for size in settings.sizes for kind in settings.data]
        num_bytes = 4 * max(settings.sizes)
    else:
        tensor = files.load(settings.input)
        sources = [Source("file", tensor.numel(), str(settings.input))]
        num_bytes = tensor.numel() * tensor.dtype.itemsize
    _check_memory(num_bytes, len(found))
    return Plan(settings, list(found.values()), sources)


def _check_memory(num_bytes: int, compressors: int) -> None:
    """Every compressor keeps a residual; an eager version takes up to ten tensors more."""
    needed, available = num_bytes * (compressors + 12), available_bytes()
    if available is not None and needed > available:
        raise SettingError(
            f"{compressors} compressors on a tensor of {num_bytes / 1e9:.1f} GB take about "
            f"{needed / 1e9:.0f} GB of memory, {available / 1e9:.0f} GB are free: choose a smaller "
            "tensor or fewer compressors"
        )
