"""Ways to average named tensors over a group, with what each has to remember."""

from thinwire.reducer.reducer import Reducer

__all__ = ["Reducer"]
