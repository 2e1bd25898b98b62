"""Collectives between hosts that are far from each other, in round trips.

    python benchmarks/wan.py [--hosts 2 4 8] [--link 100mbit] [--delay 15ms] [--rounds 9]
                             [--sizes 4096 65536 524288] [--out benchmarks/records/NAME.json]

Hosts in network namespaces, as far apart as --delay says (one way). At these distances a small
exchange costs what its messages that wait for each other cost, not its bytes, so every time is
given in round trips between two hosts too. All candidates take turns in every round. Ranks agree on
when to begin by the clock that all of them share here, and a time is that of the rank that ends
last. Figures are medians over rounds; the first two are left out, in which connections are made.

"four settings" is the tensor in four parts, each with a compressor of its own, in one exchange or
in four, which are started together.

Each candidate exchanges three times in a row. Before the first its connections were idle for a
while, and TCP then sends little at once again (net.ipv4.tcp_slow_start_after_idle); the last is
what a training sees whose exchanges follow each other closely.

Two hosts once more, after pauses of a second as long steps have them, with that setting as Linux
has it and switched off in the lab's hosts.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from harness import Target, conclude, read_options, run_ranks
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire.formatting import read_bytes, show_bytes
from thinwire.lab import Lab, parse_rate

DENSE, GATHER, DIRECT, BARRIER = "dist.all_reduce", "dist.all_gather", "isend/irecv", "dist.barrier"
SETTINGS = ("topk:0.01", "quantize:4", "topk:0.05|quantize:4", "none")
SHARED, APART = "four settings, one exchange", "four settings, four exchanges"
SPECS = ("none", "topk:0.01", "quantize:4", "quantize:4 by gather")
WARM_UP = 2  # rounds
REPEATS = 3  # exchanges in a row
FRAME = 1 << 16  # bytes of the frame that the target is about: of eight times as much in 4 bits
MOST = 1.3  # round trips, besides what its bytes take
PAUSE = 1.2  # seconds: longer than TCP keeps a window for
SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")  # of a network namespace


def rank_main(job: dict[str, Any]) -> None:
    """What runs on each rank: rank 0 prints a JSON line for every candidate, size and round."""
    import torch
    import torch.distributed as dist

    import thinwire as tw

    if "slow_start" in job:
        SLOW_START.write_text(job["slow_start"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    others = [other for other in range(size) if other != rank]

    def once(name: str, tensor: torch.Tensor, room: list[torch.Tensor]) -> str:
        """Take part in one exchange; the collective that was used."""
        if name == DENSE:
            dist.all_reduce(tensor)
        elif name == GATHER:
            dist.all_gather(room, tensor)
        elif name == DIRECT:
            works = [dist.irecv(room[other], other) for other in others]
            works += [dist.isend(tensor, other) for other in others]
            for work in works:
                work.wait()
        elif name == BARRIER:
            dist.barrier()
        elif name == SHARED:
            parts = list(tensor.chunk(len(SETTINGS)))
            return tw.all_reduce_coalesced(parts, SETTINGS).collective
        elif name == APART:
            parts = list(tensor.chunk(len(SETTINGS)))
            handles = [
                tw.all_reduce(part, spec, async_op=True)
                for part, spec in zip(parts, SETTINGS, strict=True)
            ]
            tw.wait_all(handles)
            return "+".join(handle.collective for handle in handles)
        else:
            spec, _, collective = name.partition(" by ")
            return tw.all_reduce(tensor, spec, collective=collective or "auto").collective
        return ""

    for turn in range(-WARM_UP, job["rounds"]):
        for num_bytes in job["sizes"]:
            original = torch.randn(num_bytes // 4, generator=generator)
            room = [torch.empty_like(original) for _ in range(size)]
            for name in job["candidates"]:
                tensor = original.clone()
                # Later than the news of it is anywhere.
                start = torch.tensor([time.monotonic() + job["lead"]], dtype=torch.float64)
                dist.broadcast(start, 0)
                time.sleep(max(0.0, start.item() - time.monotonic()))
                times = [start.item()]
                for _ in range(REPEATS):
                    collective = once(name, tensor, room)
                    times.append(time.monotonic())
                seconds = torch.tensor(times, dtype=torch.float64).diff()
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if rank == 0:
                    row = {"name": name, "num_bytes": num_bytes, "turn": turn}
                    row |= {"collective": collective, "seconds": seconds.tolist()}
                    print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def measure(
    hosts: int, options: argparse.Namespace, console: Console, **more: Any
) -> list[dict[str, Any]]:
    """Rows of medians, one for each size and candidate; `more` is for the ranks."""
    lab = Lab(hosts, options.link, delay=options.delay)
    trip = lab.round_trip_seconds
    job = {
        "sizes": [read_bytes(size) for size in options.sizes],
        "rounds": options.rounds,
        "candidates": [DENSE, GATHER, DIRECT, BARRIER, SHARED, APART, *options.compressors],
        "lead": 0.02 + 2 * trip * max(1, hosts.bit_length() - 1),
        **more,
    }
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{hosts} hosts")

        def on_row(row: dict[str, Any]) -> None:
            progress.update(task, description=f"{hosts} hosts: round {row['turn'] + 1}")
            if row["turn"] >= 0:
                found.setdefault((row["num_bytes"], row["name"]), []).append(row)

        run_ranks(lab, __file__, job, on_row, limit=1800)
    rows = []
    for (num_bytes, name), measured in found.items():
        times = [row["seconds"][-1] for row in measured]
        middle = statistics.median(times)
        idle = statistics.median(row["seconds"][0] for row in measured)
        rows.append(
            {
                "hosts": hosts,
                "name": name,
                "collective": measured[-1]["collective"],
                "num_bytes": num_bytes,
                "seconds": middle,
                "lowest": min(times),
                "highest": max(times),
                "round_trips": middle / trip,
                "lowest_round_trips": min(times) / trip,
                "round_trips_after_idleness": idle / trip,
            }
        )
    return sorted(rows, key=lambda row: row["num_bytes"])


def pauses(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Two hosts after pauses, with the setting of each row."""
    rows = []
    for setting in ("1", "0"):
        more = {"candidates": ["quantize:4 by gather"], "lead": PAUSE, "slow_start": setting}
        found = measure(2, options, console, **more)
        console.print(table_of(f"2 hosts, pauses, tcp_slow_start_after_idle={setting}", found))
        rows += [{**row, "slow_start_after_idle": int(setting)} for row in found]
    return rows


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for column in ("tensor", "candidate", "used", "ms", "lowest", "round trips", "after idleness"):
        left = column in ("candidate", "used")
        table.add_column(column, justify="left" if left else "right")
    for row in rows:
        table.add_row(
            show_bytes(row["num_bytes"]),
            row["name"],
            row["collective"],
            f"{1e3 * row['seconds']:.1f}",
            f"{1e3 * row['lowest']:.1f}",
            f"{row['round_trips']:.2f}",
            f"{row['round_trips_after_idleness']:.2f}",
        )
    return table


def targets_of(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[Target]:
    """A gather of frames of 64 KiB takes little more than a round trip and its bytes."""
    targets = []
    lab = Lab(2, options.link, delay=options.delay)
    rate = parse_rate(options.link)
    for row in rows:
        if row["name"] == "quantize:4 by gather" and row["num_bytes"] == 8 * FRAME:
            sending = 8 * (row["hosts"] - 1) * FRAME / rate
            trips = (row["seconds"] - sending) / lab.round_trip_seconds
            what = f"{row['hosts']} hosts, gather of 64 KiB frames: round trips besides its bytes"
            targets.append(Target.at_most(what, trips, MOST))
    return targets


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8], help="how many (2 4 8)")
    parser.add_argument("--link", default="100mbit", help="rate of each host's link (100mbit)")
    parser.add_argument("--delay", default="15ms", help="of what a host sends, one way (15ms)")
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["4096", "65536", f"{8 * FRAME}"],
        help=f"bytes of the tensor (4096 65536 {8 * FRAME})",
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds to take the median of (9)")
    parser.add_argument("--compressors", nargs="+", default=SPECS, help="specs to try")
    options = read_options(parser)
    if options.as_rank:
        rank_main(json.loads(Path(options.as_rank).read_text()))
        return 0
    console = Console()
    rows = []
    for hosts in options.hosts:
        rows += measure(hosts, options, console)
        title = f"{hosts} hosts, {options.link}, {options.delay} of delay each way"
        console.print(table_of(title, [row for row in rows if row["hosts"] == hosts]))
    measured = {"rows": rows, "pauses": pauses(options, console)}
    return conclude(console, options, "thinwire.wan/2", measured, targets_of(rows, options))


if __name__ == "__main__":
    sys.exit(main())
