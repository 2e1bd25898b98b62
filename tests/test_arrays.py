"""NumPy arrays in place of tensors, and what cannot be compressed at all."""

import numpy as np
import pytest
import torch
from tensors import normal, same

import thinwire as tw

X = normal(60, 1).view(6, 10)
ARRAYS = {  # all of the same numbers
    "plain": X.numpy(),
    "read-only": np.frombuffer(X.numpy().tobytes(), np.float32).reshape(6, 10),
    "column by column": np.asfortranarray(X.numpy()),
    "backwards": X.numpy()[::-1].copy()[::-1],
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_is_compressed_as_its_tensor(kind):
    for spec in ("topk:0.1", "quantize:4", "none"):
        compressor = tw.parse(spec)
        assert same(tw.pack(compressor.encode(ARRAYS[kind])), tw.pack(compressor.encode(X)))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int64, np.bool_])
def test_arrays_of_all_types_are_taken(dtype):
    array = (X.numpy() * 3).astype(dtype)
    found = tw.NoCompression()
    assert same(found.decode(found.encode(array)), torch.from_numpy(array))


def test_residuals_and_results_are_written_into_arrays():
    compressor, kept, wanted = tw.TopK(0.1), np.zeros((6, 10), np.float32), torch.zeros(6, 10)
    for _ in range(3):
        payload = compressor.encode(X.numpy(), residual=kept)
        assert same(tw.pack(payload), tw.pack(compressor.encode(X, residual=wanted)))
        assert same(torch.from_numpy(kept), wanted)
    out = np.empty((6, 10), np.float32)
    assert same(compressor.decode(payload, out), torch.from_numpy(out))
    compressor.accumulate(payload, out, 2.0)
    compressor.accumulate([payload, payload], out[::1])
    assert same(torch.from_numpy(out), 5 * payload.restore())


def frozen(shape: tuple[int, ...]) -> np.ndarray:
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


TOPK = tw.TopK(0.1)
REFUSED = {
    "list": (lambda: TOPK.encode([1.0]), "TopK.encode: x must be a tensor or a NumPy array, got l"),
    "number": (lambda: TOPK.encode(1.0), "TopK.encode: x must be a tensor or a NumPy array, got f"),
    "words": (lambda: TOPK.encode(np.array(["a"])), "can't convert np.ndarray of type numpy.str_"),
    "frozen residual": (
        lambda: TOPK.encode(X, residual=frozen((6, 10))),
        "TopK.encode: residual is read-only",
    ),
    "frozen result": (
        lambda: TOPK.decode(TOPK.encode(X), frozen((6, 10))),
        "TopK.decode: out is read-only",
    ),
    "backwards": (
        lambda: TOPK.accumulate(TOPK.encode(X), np.zeros(60, np.float32)[::-1]),
        "TopK.accumulate: out is read-only or has negative strides",
    ),
    "frame": (lambda: TOPK.decode(tw.pack(TOPK.encode(X))), "TopK reads payloads, got Tensor"),
    "bytes": (lambda: TOPK.accumulate(b"abc", X.clone()), "TopK reads payloads, got bytes"),
    "coo": (
        lambda: TOPK.encode(torch.eye(3).to_sparse()),
        "TopK: expected a dense tensor, got a sparse_coo one: call to_dense() first",
    ),
    "residual": (
        lambda: TOPK.encode(torch.eye(3), residual=torch.eye(3).to_sparse()),
        "TopK, residual: expected a dense tensor, got a sparse_coo one",
    ),
    "meta": (
        lambda: TOPK.encode(torch.empty(3, device="meta")),
        "TopK: expected a dense tensor, got ",
    ),
    "key": (lambda: TOPK.encode(X, key=3), "key must be a tw.Key(seed, step, tensor), got 3"),
    "class of a feedback": (
        lambda: tw.feedback.parse(tw.feedback.EF14),
        "EF14 is a class, give an object: EF14(...)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compressed_is_refused_with_a_reason(case):
    attempt, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError)) as caught:
        attempt()
    assert str(caught.value).startswith(message)
