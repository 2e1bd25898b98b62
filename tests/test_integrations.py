"""What of the integrations needs no framework: arrays and bytes, and errors where one is missing.

The frameworks themselves: tests/integrations, by `make test-integrations`.
"""

import importlib.util

import numpy as np
import pytest

import thinwire as tw


@pytest.mark.parametrize("spec", ["topk:0.05|quantize:4", "onebit", "quantize:8", "none"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_what_is_decoded_and_what_is_left_make_up_the_array(spec, dtype):
    array = np.random.default_rng(0).normal(size=(40, 30)).astype(dtype)
    residual = np.zeros((40, 30), np.float64 if dtype == np.float64 else np.float32)
    before = array.copy()
    frame = tw.numpy.encode(array, spec, residual=residual)
    restored = tw.numpy.decode(frame)
    assert isinstance(frame, bytes)
    assert (restored.shape, restored.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(array, before)
    np.testing.assert_allclose(restored + residual, array, atol=2e-3)


def test_frames_are_those_of_tensors():
    array = np.arange(100, dtype=np.float32)
    frame = tw.numpy.encode(array, "quantize:4")
    assert frame == tw.pack(tw.Quantize(4).encode(array)).numpy().tobytes()
    for given in (bytearray(frame), memoryview(frame)):
        np.testing.assert_array_equal(tw.numpy.decode(given), tw.numpy.decode(frame))


@pytest.mark.parametrize("wrong", [b"", b"no frame at all", bytes(1000)])
def test_what_is_no_frame_is_a_frame_error(wrong):
    with pytest.raises(tw.FrameError):
        tw.numpy.decode(wrong)


@pytest.mark.parametrize("name", ["accelerate", "flower", "lightning", "transformers"])
def test_a_missing_framework_is_told_with_the_pip_line(name):
    package = {"flower": "flwr"}.get(name, name)
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(tw.errors.MissingExtraError, match=rf"pip install 'thinwire\[{name}\]'"):
        getattr(tw, name)
