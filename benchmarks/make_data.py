"""Make the data of thinwire.workloads from their original sources.

    python benchmarks/make_data.py --images FOLDER --text FOLDER [--out FOLDER]

`--images` holds the four files of Fashion-MNIST (`train-images-idx3-ubyte.gz` and so on), `--text`
the chapters of Moby Dick as text files with `file_list.json`, their order. Where to get both, and
what is made of them, stands in src/thinwire/workloads/data/README.md. Prints the SHA-256 of each
file and of what is in it; the second does not depend on the version of zstandard.
"""

import argparse
import gzip
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import zstandard

DATA = Path(__file__).resolve().parents[1] / "src/thinwire/workloads/data"
CLASSES = 10
PER_CLASS = {"train": 1200, "t10k": 300}
LEVEL = 19


def read_idx(path: Path) -> np.ndarray:
    """Bytes behind a header of two zeros, the type (8: uint8), the rank, and big-endian sizes."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} must hold uint8 in IDX format, it starts with {data[:4].hex()}")
    sizes = np.frombuffer(data, ">u4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(*sizes.tolist())


def images(folder: Path, part: str) -> bytes:
    """The first images of each class in the order of the original, (class, image, 28, 28)."""
    pixels = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
    chosen = [pixels[labels == label][: PER_CLASS[part]] for label in range(CLASSES)]
    file = io.BytesIO()
    np.save(file, np.stack(chosen), allow_pickle=False)
    return file.getvalue()


def text(folder: Path) -> bytes:
    """The whole book but for the table of contents, with an empty line between chapters."""
    names = json.loads((folder / "file_list.json").read_text(encoding="utf-8"))
    chapters = [
        (folder / name).read_text(encoding="utf-8").strip()
        for name in names
        if name != "contents.txt"
    ]
    return ("\n\n".join(chapters) + "\n").encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=Path, required=True, help="folder of Fashion-MNIST")
    parser.add_argument("--text", type=Path, required=True, help="folder of Moby Dick")
    parser.add_argument("--out", type=Path, default=DATA, help="where to write (default: in src)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made = {
        "fashion-mnist-train.npy": images(options.images, "train"),
        "fashion-mnist-test.npy": images(options.images, "t10k"),
        "moby-dick.txt": text(options.text),
    }
    for name, content in made.items():
        stored = zstandard.ZstdCompressor(level=LEVEL).compress(content)
        (options.out / f"{name}.zst").write_bytes(stored)
        for what, data in ((f"{name}.zst", stored), (name, content)):
            print(f"{hashlib.sha256(data).hexdigest()}  {what}  {len(data):,} bytes")


if __name__ == "__main__":
    main()
