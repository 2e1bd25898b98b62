"""The data that ship with thinwire: what they are stands in data/README.md. Nothing is downloaded.

Each loader gives the same tensors to all who ask in a process: read them, never write them.
"""

import hashlib
import io
from functools import cache
from importlib import resources
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CLASSES = 10
HELD_OUT = 0.1  # of the text, at its end

# Of what is in the files: these do not change with the version of zstandard that wrote them.
SHA256 = {
    "fashion-mnist-train.npy": "35a0a3f4db63cc896284255079fccf10a6a79e29650ddc0d30c7f57153bf8f50",
    "fashion-mnist-test.npy": "29b2f6c006a4488495172f336e8b0e206f8fdf9c6af54ed6333e0dc22ba1f48f",
    "moby-dick.txt": "3a19c43c7ade3e2bf8f6647b3db6381aa2de820f1b6bbe49e55bd2e65146393f",
}


class Pictures(NamedTuple):
    """Grey pictures, uint8 of shape (class, number, 28, 28): the label is the first index."""

    train: Tensor
    test: Tensor


class Book(NamedTuple):
    """Characters as numbers: uint8, each the position of a character in `alphabet`."""

    train: Tensor
    test: Tensor
    alphabet: str


def read(name: str) -> bytes:
    """The content of one of the files, checked."""
    import zstandard

    stored = resources.files("thinwire.workloads").joinpath("data", f"{name}.zst").read_bytes()
    content: bytes = zstandard.ZstdDecompressor().decompress(stored)
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ValueError(
            f"{name}: SHA-256 must be {SHA256[name]}, got {found}: the file is damaged, install "
            "thinwire again"
        )
    return content


@cache
def pictures() -> Pictures:
    """Fashion-MNIST: 1200 pictures of each class to train on and 300 to test on."""
    parts = ("fashion-mnist-train.npy", "fashion-mnist-test.npy")
    arrays = [np.load(io.BytesIO(read(part)), allow_pickle=False) for part in parts]
    return Pictures(*(torch.from_numpy(array) for array in arrays))


@cache
def book() -> Book:
    """Moby Dick: the last tenth is to test on."""
    text = read("moby-dick.txt").decode()
    alphabet = "".join(sorted(set(text)))
    number = {character: position for position, character in enumerate(alphabet)}
    numbers = torch.tensor([number[character] for character in text], dtype=torch.uint8)
    held_out = round(len(text) * HELD_OUT)
    return Book(numbers[:-held_out], numbers[-held_out:], alphabet)
