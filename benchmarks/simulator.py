"""How fast the simulator is: a step of 10,000 ranks, and the same messages in SimPy.

    python benchmarks/simulator.py [--ranks 10000] [--parameters 650M] [--out NAME.json]

650M parameters are 100 buckets. SimPy is no dependency of thinwire: `pip install simpy` to have it
measured too. There each link is a resource of capacity one and each message a process that holds
one after the other: what our own loop does, for the messages of a round of 64 ranks.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np
from harness import Target, conclude, read_options
from rich.console import Console

import thinwire as tw
from thinwire.formatting import read_count
from thinwire.plan.events import pass_links
from thinwire.plan.simulate import make_world, simulate_step
from thinwire.plan.sizes import UniformModel
from thinwire.policies.codecs import shipped

MESSAGES = 64 * 63  # of a round of 64 ranks


def step_seconds(ranks: int, parameters: int) -> list[dict[str, Any]]:
    """A step with plain DDP and with compressors, in racks of 40 with stragglers."""
    world = make_world(
        ranks,
        1.25e9,
        delay=5e-5,
        ranks_per_rack=40,
        oversubscribed=4.0,
        stragglers=0.01,
        uneven=0.1,
    )
    table, model = shipped()["cores-16"], UniformModel(parameters)
    small = make_world(8, 1e9)
    simulate_step(small, model.plain(), 1.0, "plain")  # compiles
    simulate_step(small, model.compressed(tw.parse("quantize:4"), table, 8), 1.0)
    rows = []
    for method, collective in (
        ("ddp", "plain"),
        ("quantize:4", "auto"),
        ("topk:0.01", "auto"),
        ("quantize:4", "tree"),
        ("quantize:4", "grouped"),
    ):
        due = model.plain() if method == "ddp" else model.compressed(tw.parse(method), table, ranks)
        begin = time.perf_counter()
        found = simulate_step(world, due, 1.0, collective)
        seconds = time.perf_counter() - begin
        row = {"method": method, "collective": collective, "exchanges": len(due)}
        rows.append(row | {"seconds": seconds, "events": found.events, "step": found.seconds})
    return rows


def messages() -> tuple[np.ndarray[Any, Any], ...]:
    """A round of messages from each of 64 ranks to each, through two links."""
    sender, receiver = (each.ravel() for each in np.meshgrid(np.arange(64), np.arange(64)))
    keep = sender != receiver
    path = np.stack([sender[keep], 64 + receiver[keep]], axis=1)
    return np.zeros(MESSAGES), path, np.full(path.shape, 1e4), np.full(128, 1e8)


def events_per_second() -> dict[str, float]:
    release, path, sizes, rates = messages()
    pass_links(release, release, path, sizes, rates)
    begin, rounds = time.perf_counter(), 20
    for _ in range(rounds):
        _, tail = pass_links(release, release, path, sizes, rates)
    found = {"ours": rounds * path.size / (time.perf_counter() - begin)}
    try:
        import simpy
    except ImportError:
        return found
    begin = time.perf_counter()
    environment = simpy.Environment()
    links = [simpy.Resource(environment, capacity=1) for _ in range(128)]
    ends = []

    def message(number: int) -> Any:
        for place in range(path.shape[1]):
            with links[path[number, place]].request() as request:
                yield request
                yield environment.timeout(sizes[number, place] / rates[path[number, place]])
        ends.append(environment.now)

    for number in range(MESSAGES):
        environment.process(message(number))
    environment.run()
    found["simpy"] = path.size / (time.perf_counter() - begin)
    # Ours cuts through, SimPy's messages are stored and forwarded: about one message apart.
    found["ends_ours"], found["ends_simpy"] = float(tail.max()), float(max(ends))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--parameters", type=read_count, default=650_000_000)
    options = read_options(parser)
    console = Console(width=120)
    rows = step_seconds(options.ranks, options.parameters)
    for row in rows:
        console.print(row)
    rate = events_per_second()
    console.print(rate)
    slowest = max(row["seconds"] for row in rows)
    targets = [Target.at_most("seconds for the slowest of these steps", slowest, 60)]
    measured = {"steps": rows, "events_per_second": rate}
    return conclude(console, options, "thinwire.simulator/1", measured, targets)


if __name__ == "__main__":
    sys.exit(main())
