"""What this host has sent, by the kernel's own count."""

import subprocess
from pathlib import Path

HEADERS = 66  # bytes of Ethernet, IP and TCP before each packet's payload
SEGMENT = 1448  # payload of a full packet
FULL = (SEGMENT + HEADERS) / SEGMENT  # bytes on the link for each byte of payload

_DEVICES = Path("/proc/net/dev")


def sent(world: int, loopback: bool) -> int:
    """Bytes of payload that this host has sent since it began.

    On loopback all ranks share one counter: each is told its share of it.
    """
    if _DEVICES.exists():
        counts = from_proc(_DEVICES.read_text())
    else:  # macOS, where there is no lab either
        command = ["netstat", "-ibn"]
        counts = from_netstat(subprocess.run(command, capture_output=True, text=True).stdout)
    chosen = [count for name, count in counts.items() if name.startswith("lo") == loopback]
    return max(0, sum(chosen)) // (world if loopback else 1)


def from_proc(text: str) -> dict[str, int]:
    """Payload sent by each interface, from /proc/net/dev."""
    found = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.partition(":")
        fields = rest.split()
        found[name.strip()] = int(fields[8]) - HEADERS * int(fields[9])
    return found


def from_netstat(text: str) -> dict[str, int]:
    """The same from `netstat -ibn`: ... Opkts Oerrs Obytes Coll, on the lines of the links."""
    found = {}
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 10 and fields[2].startswith("<Link"):
            found[fields[0].rstrip("*")] = int(fields[-2]) - HEADERS * int(fields[-4])
    return found
