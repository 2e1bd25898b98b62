"""Averaging named tensors over a group, with what has to be remembered."""

from thinwire.reducer.reducer import Reducer

__all__ = ["Reducer"]
