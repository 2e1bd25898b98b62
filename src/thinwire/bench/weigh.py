"""Peak memory of encoding, measured in a process of its own.

Its own, because the allocator of the C library can be told to return freed memory at once only when
a process starts (see `memory`), and because that would slow down what the benchmark times. The
process reads its task from standard input and prints one number a line.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence

import torch

from thinwire.bench.memory import ENVIRONMENT, peak_extra_bytes
from thinwire.bench.source import Source
from thinwire.bench.subject import Subject
from thinwire.compressors import local_of


def extra_bytes(
    sources: Sequence[Source], compressors: Sequence[str], threads: int
) -> Generator[int, None, None]:
    """Bytes that `encode` with a residual adds at its peak: all compressors on the first tensor,
    then on the next.

    Ends early if the other process does, for want of memory perhaps.
    """
    task = json.dumps([sources, compressors, threads])
    with subprocess.Popen(
        [sys.executable, "-m", "thinwire.bench.weigh"],
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for us alone: we end the other process
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                process.stdin.write(task + "\n")
                process.stdin.close()
            yield from map(int, process.stdout)
        finally:
            process.kill()


def main() -> None:
    """The other process."""
    sources, compressors, threads = json.loads(sys.stdin.readline())
    torch.set_num_threads(threads)
    for source in sources:
        x = Source(*source).make()
        for compressor in map(local_of, compressors):
            subject = Subject(compressor, x)
            subject.warm_up()
            print(peak_extra_bytes(functools.partial(subject.encode, 0)), flush=True)


if __name__ == "__main__":
    main()
