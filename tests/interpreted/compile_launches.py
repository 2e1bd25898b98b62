"""Compile recorded launches for GPUs that are not there: FILE, then targets (sm_80, gfx942).

Prints a line of JSON: how many were compiled, and which instructions there are that round
otherwise than the reference or depend on who comes first.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

from launches import compile_for
from triton.backends.compiler import GPUTarget

# Of PTX: fused, approximate or flushing arithmetic, atomics. `cvt.rmi` is the floor of a number
# that no level depends on when it is that small.
WRONG = re.compile(
    r"\bfma\.\S+|\bmad\.\S*f\d+|\b(?:div|sqrt|rcp)\.(?:approx|full)\S*"
    r"|(?<![\w.])(?!cvt\.rmi)\w+\.\S*ftz\S*|\batom\.\S+|\bred\.(?!async)\S+"
)


def target_of(name: str) -> GPUTarget:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64)


def main() -> None:
    file, *names = sys.argv[1:]
    wrong: Counter[str] = Counter()
    count = 0
    for line in Path(file).read_text().splitlines():
        for name in names:
            asm = compile_for(line, target_of(name))
            count += 1
            for found in WRONG.findall(str(asm.get("ptx", ""))):
                wrong[f"{json.loads(line)[1]}: {found}"] += 1
    print(json.dumps({"compiled": count, "wrong": wrong}))


if __name__ == "__main__":
    main()
