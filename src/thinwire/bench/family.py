"""Compressors by what they send, for the legend of the plot."""

from thinwire.compressors import Chain, Compressor, Tiered
from thinwire.compressors.sparsifiers import Sparsifier

FAMILIES = ("every bit", "shorter floats", "some elements", "few levels", "signs", "combined")

_BY_NAME = {
    "none": "every bit",
    "lossless": "every bit",
    "cast": "shorter floats",
    "onebit": "signs",
    "scaledsign": "signs",
    "terngrad": "signs",
}


def family_of(compressor: Compressor) -> str:
    """One of `FAMILIES`; a quantiser is what nothing else claims."""
    if isinstance(compressor, Chain | Tiered):
        return "combined"
    if isinstance(compressor, Sparsifier):
        return "some elements"
    return _BY_NAME.get(compressor.name, "few levels")
