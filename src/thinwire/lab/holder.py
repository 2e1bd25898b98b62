"""The process that holds a lab's namespaces: `python -m thinwire.lab.holder <parent>`.

It answers requests, one line of JSON each, on its standard input and output. When the input ends or
the process <parent> does, it kills what still runs in the lab and goes; with it go namespaces,
bridges and links, because nothing else keeps them. So nothing of a lab outlives the process that
opened it, however that one ends.
"""

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from thinwire.lab.distance import Distance
from thinwire.lab.network import BuildError, Network, Switches
from thinwire.lab.topology import DistanceSettings, LinkSettings, Station

_LONGEST_SECONDS = 5.0  # of killing


def main(parent: int) -> None:
    # The terminal's Ctrl-C is for the process that opened the lab.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    watched = os.pidfd_open(parent)
    if os.getppid() != parent:  # gone before we could watch, and the number may be another's now
        return
    try:
        network = Network()
    except BuildError as error:
        _answer({"error": str(error)})
        return
    try:
        _answer({"holder": os.getpid()})
        _serve(network, watched)
    finally:
        _kill_all_in(network.namespaces())


def _serve(network: Network, watched: int) -> None:
    # Not sys.stdin: what it has read ahead cannot be waited for.
    received = b""
    while True:
        ready, _, _ = select.select([0, watched], [], [])
        if watched in ready:
            return
        chunk = os.read(0, 2**16)
        if not chunk:
            return
        *lines, received = (received + chunk).split(b"\n")
        for line in lines:
            try:
                _answer({"value": _do(network, json.loads(line))})
            except BuildError as error:
                _answer({"error": str(error)})


def _do(network: Network, request: dict[str, Any]) -> object:
    match request:
        case {"do": "set_up", "racks": racks, "inter": inter, "distance": distance}:
            inter = inter and LinkSettings(**inter)
            network.wiring = (
                Switches(network.talk, racks, inter)
                if distance is None
                else Distance(network.namespace, inter, DistanceSettings(**distance))
            )
            return None
        case {"do": "plug_in", "address": address, "link": link, "rack": rack}:
            return network.plug_in(Station(address, LinkSettings(**link), rack))
        case {"do": "connect"}:
            return network.wiring.connect()
        case {"do": "set_link", "host": host, "link": link}:
            network.wiring.set_link(host, LinkSettings(**link))
            return None
        case {"do": "set_inter", "link": link}:
            network.wiring.set_inter(LinkSettings(**link))
            return None
        case {"do": "counters"}:
            return network.wiring.counters()
        case {"do": "inter_counters"}:
            return network.wiring.inter_counters()
        case {"do": "lateness"}:
            return network.wiring.lateness()
    raise AssertionError(f"unknown request {request}")


def _answer(answer: dict[str, object]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def _kill_all_in(namespaces: set[int]) -> None:
    """Kill all processes in these network namespaces but this one, until none is left.

    More than one look is needed: a process may start another between the look and the kill. What
    does not die in seconds is stuck in the kernel, and waiting longer would not help it.
    """
    end = time.monotonic() + _LONGEST_SECONDS
    while (found := _inhabitants(namespaces)) and time.monotonic() < end:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.005)


def _inhabitants(namespaces: set[int]) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and _namespace(pid) in namespaces]


def _namespace(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:  # it is gone, it is a zombie, or it is not ours to look at
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
