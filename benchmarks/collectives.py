"""Compressed collectives against their targets: on a slow network, on loopback, and by ranks.

    python benchmarks/collectives.py [--hosts 4] [--link 100mbit] [--size 10M] [--rounds 7]
                                     [--out benchmarks/records/NAME.json]

Five parts. On hosts in network namespaces with links of the given rate: the time of compressed all-
reduces against torch's own, and their bytes against the counters of the interfaces. Beside them
floors: torch alone moves as long frames, by its quickest ways to do so, and adds nothing up; where
the whole tensor has to be looked at before anything can be sent, that comes before it. On loopback:
what NoCompression costs over plain `dist.all_reduce`. Small: the same for tensors of 1,000
elements, with 2 and 4 ranks. On loopback with 2 to 8 ranks: how bytes grow. Stages: two hosts of
one core each, with links of the rate at which a message takes as long as compressing and adding up,
so that an exchange in which the two take turns needs twice as long as one in which they overlap;
with one large tensor, and with five one behind the other. Beside them the floor: all that
compressing and adding up while torch alone moves the same bytes, neither waiting for the other.
What it takes longer than either is what TCP takes of the one core that both have.

All candidates of a part take turns in every round; figures are medians over rounds of the slowest
rank. All ranks share this machine's cores, which adds to the time of the compressed candidates on
the fast and never on the slow side.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Target, conclude, read_options, run_ranks
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire.compare.counters import FULL
from thinwire.formatting import read_count
from thinwire.lab import Cluster, Lab, Loopback, parse_rate

SLOW = (
    ("dense", "dense", "auto", False),
    ("cast:bf16", "cast:bf16", "auto", False),
    ("topk:0.01 gather", "topk:0.01", "gather", False),
    ("topk:0.01 gather, residual", "topk:0.01", "gather", True),
    ("topk:0.01 sparse", "topk:0.01", "sparse", False),
    ("topk:0.01 sparse, residual", "topk:0.01", "sparse", True),
    ("quantize:4 twoshot", "quantize:4", "twoshot", False),
    ("quantize:4 twoshot, residual", "quantize:4", "twoshot", True),
    ("onebit twoshot, residual", "onebit", "twoshot", True),
    ("floor: topk:0.01 gather", "topk:0.01", "gather", False),
    ("floor: topk:0.01 sparse", "topk:0.01", "sparse", False),
    ("floor: quantize:4 twoshot", "quantize:4", "twoshot", False),
    ("floor: onebit twoshot", "onebit", "twoshot", False),
)
FLOOR = "floor"  # of an exchange: what torch alone takes for it
STAGED = ("quantize:4", "onebit")
LOOPBACK = (("dense", "dense", "auto", False), ("none", "none", "auto", False))
SMALL = (
    *LOOPBACK,
    ("quantize:4", "quantize:4", "auto", False),
    ("topk:0.01, residual", "topk:0.01", "auto", True),
)
SMALL_NUMEL, SMALL_ROUNDS = 1000, 60
GROWTH = (
    ("topk:0.01 gather", "topk:0.01", "gather", False),
    ("quantize:4 twoshot", "quantize:4", "twoshot", False),
    ("topk:0.01 sparse", "topk:0.01", "sparse", False),
)


def rank_main(job: dict[str, Any]) -> None:
    """What runs on each rank: print a JSON line for every candidate and round, on rank 0."""
    import torch
    import torch.distributed as dist

    import thinwire as tw
    from thinwire.compare.counters import sent

    torch.set_num_threads(job["threads"])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(job["numel"], generator=generator) for _ in range(2)]
    tensor = torch.empty(job["numel"])
    residuals = {name: torch.zeros(job["numel"]) for name, _, _, kept in job["runs"] if kept}

    frames: dict[str, torch.Tensor] = {}

    def frame_of(spec: str) -> torch.Tensor:
        return tw.pack(tw.parse(spec).encode(gradients[0]))

    if any(name.startswith(FLOOR) for name, *_ in job["runs"]):
        # One connection for each direction: on one, gloo lets messages that cross wait.
        directions = [dist.new_group(list(range(size))) for _ in range(2)]

    def to_each(frame: torch.Tensor) -> None:
        """A share of the frame to each other rank, receives first."""
        share = frame[: frame.numel() // size]
        works = []
        for step in range(1, size):
            source = (rank - step) % size
            came, group = torch.empty_like(share), directions[source > rank]
            works.append(dist.irecv(came, source, group=group))
        for step in range(1, size):
            target = (rank + step) % size
            works.append(dist.isend(share, target, group=directions[target < rank]))
        for work in works:
            work.wait()

    def to_all(message: torch.Tensor) -> None:
        dist.all_gather_into_tensor(message.new_empty(size * message.numel()), message)

    def floor(spec: str, collective: str) -> None:
        """What torch alone takes to move what an exchange does."""
        frame = frame_of(spec) if collective != "twoshot" else frames[spec]
        length = torch.tensor([frame.numel()])
        dist.all_reduce(length, op=dist.ReduceOp.MAX)  # an all-gather needs one length
        message = frame.new_zeros(int(length))
        if collective == "gather":
            to_all(message)
        else:
            to_each(message)
            to_all(message[: message.numel() // size])

    def once(name: str, spec: str, collective: str, turn: int) -> list[float]:
        tensor.copy_(gradients[turn % 2])
        if name.startswith(FLOOR) and spec not in frames:
            frames[spec] = frame_of(spec)
        dist.barrier()
        before = sent(size, job["loopback"])
        begin = time.perf_counter()
        if spec == "dense":
            dist.all_reduce(tensor)
            seconds = time.perf_counter() - begin
            moved = 2 * (size - 1) * tensor.nbytes // size
            reported, parts = moved, [0.0, seconds, 0.0]
        elif name.startswith(FLOOR):
            floor(spec, collective)
            seconds = time.perf_counter() - begin
            reported, parts = 0, [0.0, seconds, 0.0]
        else:
            residual = residuals.get(name)
            handle = tw.all_reduce(tensor, spec, collective=collective, residual=residual)
            seconds = time.perf_counter() - begin
            kinds = ("encode", "network", "decode")
            parts = [handle.account.seconds.get(kind, 0.0) for kind in kinds]
            reported = handle.account.network_bytes
        time.sleep(0.02)  # last acknowledgements
        counted = sent(size, job["loopback"]) - before
        return [seconds, float(reported), float(counted), *parts]

    for turn in range(-1, job["rounds"]):  # the first compiles and connects
        for name, spec, collective, _ in job["runs"]:
            mine = torch.tensor(once(name, spec, collective, turn), dtype=torch.float64)
            table = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(table, mine)
            if rank == 0:
                rows = torch.stack(table)
                fields = {
                    "name": name,
                    "turn": turn,
                    "seconds": rows[:, 0].max().item(),
                    "reported_bytes": rows[:, 1].mean().item(),
                    "counted_bytes": rows[:, 2].mean().item(),
                    "encode": rows[:, 3].mean().item(),
                    "network": rows[:, 4].mean().item(),
                    "decode": rows[:, 5].mean().item(),
                }
                print(json.dumps(fields), flush=True)
    dist.destroy_process_group()


def rank_stages(job: dict[str, Any]) -> None:
    """Seconds of the codec alone on the first of two hosts, or of exchanges."""
    import torch
    import torch.distributed as dist

    import thinwire as tw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    generator, compressor = torch.Generator().manual_seed(rank), tw.parse(job["spec"])
    gradient = torch.randn(job["numel"], generator=generator)
    tensor, residual = torch.empty_like(gradient), torch.zeros_like(gradient)

    def codec() -> float:
        """Encoding, and the sum of two messages, as a gather of two ranks does them."""
        begin = time.perf_counter()
        frame = tw.pack(compressor.encode(gradient, residual=residual))
        tensor.zero_()
        compressor.accumulate([tw.unpack(frame), tw.unpack(frame)], tensor)
        seconds = time.perf_counter() - begin
        job["frame"] = frame.numel()
        return seconds

    def exchange(count: int) -> float:
        tensor.copy_(gradient)
        dist.barrier()
        begin = time.perf_counter()
        pieces = zip(tensor.tensor_split(count), residual.tensor_split(count), strict=True)
        tw.wait_all(
            tw.all_reduce(x, compressor, residual=r, collective="gather", async_op=True)
            for x, r in pieces
        )
        return time.perf_counter() - begin

    # One connection for each direction: on one, gloo lets messages that cross wait for each other.
    directions = [dist.new_group([0, 1]) for _ in range(2)]

    def floor() -> float:
        """The codec and the transfer at the same time, with nothing of ours between them."""
        message = torch.empty(job["frame"], dtype=torch.uint8)
        came = torch.empty_like(message)
        dist.barrier()
        begin = time.perf_counter()
        under_way = [
            dist.irecv(came, 1 - rank, group=directions[1 - rank]),
            dist.isend(message, 1 - rank, group=directions[rank]),
        ]
        codec()
        for each in under_way:
            each.wait()
        return time.perf_counter() - begin

    codec()  # says how long a message is
    works: dict[str, Callable[[], float]] = {"codec": codec}
    if not job["codec"]:
        works |= {"1": lambda: exchange(1), "5": lambda: exchange(5), "floor": floor}
    for turn in range(-2, job["rounds"]):
        for name, work in works.items():
            dist.barrier()
            seconds = torch.tensor([work()], dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if rank == 0 and turn >= 0:
                row = {"name": name, "turn": turn, "seconds": seconds.item()}
                print(json.dumps(row | {"frame": job.get("frame")}), flush=True)
    dist.destroy_process_group()


def stages(job: dict[str, Any], console: Console) -> tuple[list[dict[str, Any]], list[Target]]:
    """For each compressor, an exchange over the longer of its two halves."""
    found, targets = [], []
    for spec in STAGED:
        own = {**job, "stages": True, "spec": spec}
        runs = [("codec", "auto", "auto", False)]
        (codec,) = measure(
            f"{spec}: codec", Loopback(2), {**own, "codec": True, "runs": runs}, console
        )
        rate = 8 * FULL * codec["frame"] / codec["seconds"]
        link = f"{rate / 1e6:.0f}mbit"
        runs = [(name, "auto", "auto", False) for name in ("codec", "1", "5", "floor")]
        again, *moved = measure(
            f"{spec}: stages", Lab(2, link), {**own, "codec": False, "runs": runs}, console
        )
        # The codec once more, in turn with the exchanges: the machine may have become slower.
        longer = max(again["seconds"], 8 * FULL * codec["frame"] / parse_rate(link))
        found += [{"spec": spec, "link": link, "longer": longer, **row} for row in moved]
        for row, what in zip(moved, ("one tensor", "five tensors"), strict=False):
            over = row["seconds"] / longer
            targets.append(Target.at_most(f"{spec}, {what}: time over the longer half", over, 1.2))
    return found, targets


def measure(
    title: str, cluster: Cluster, job: dict[str, Any], console: Console
) -> list[dict[str, Any]]:
    """Rows of medians, one for each candidate."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in job["runs"]}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title)

        def on_row(row: dict[str, Any]) -> None:
            progress.update(task, description=f"{title}: round {row['turn'] + 1}, {row['name']}")
            if row["turn"] >= 0:
                found[row["name"]].append(row)

        run_ranks(cluster, __file__, job, on_row, limit=3600)
    rows = []
    for name, measured in found.items():
        keys = [key for key, value in measured[0].items() if isinstance(value, int | float)]
        keys = [key for key in keys if key != "turn"]
        row = {key: statistics.median(each[key] for each in measured) for key in keys}
        times = [each["seconds"] for each in measured]
        rows.append({"name": name, **row, "lowest": min(times), "highest": max(times)})
    return rows


def slow_targets(rows: list[dict[str, Any]], rate: float) -> list[Target]:
    by_name = {row["name"]: row for row in rows}
    dense = by_name["dense"]["seconds"]
    targets = []
    for name, bound in (("topk:0.01 gather", 25), ("quantize:4 twoshot", 7)):
        speed = dense / by_name[name]["seconds"]
        targets.append(Target.at_least(f"{name}: times faster than dense", speed, bound))
    ours = [row for row in rows[1:] if not row["name"].startswith(FLOOR)]
    for row in ours:
        ideal = 8 * FULL * row["counted_bytes"] / rate
        longer = max(ideal, row["encode"] + row["decode"])
        what = f"{row['name']}: time over its bytes / rate, or its codec if longer"
        targets.append(Target.at_most(what, row["seconds"] / longer, 1.15))
    for row in rows[:1] + ours:
        share = row["reported_bytes"] / row["counted_bytes"]
        what = f"{row['name']}: bytes reported / counted"
        targets.append(Target(what, share, "0.95 to 1.05", 0.95 <= share <= 1.05))
    return targets


def growth_targets(found: dict[int, list[dict[str, Any]]]) -> list[Target]:
    sent = {
        ranks: {row["name"]: row["reported_bytes"] for row in rows} for ranks, rows in found.items()
    }
    targets = []
    for name, *_ in GROWTH:
        grown = sent[8][name] / sent[2][name]
        # A frame to each other rank, or 2 (P - 1) / P of one; 5 % for headers and uneven regions.
        wanted = 7 if "gather" in name else 1.75
        met = abs(grown / wanted - 1) <= 0.05
        what = f"{name}: bytes of a rank, 8 ranks / 2 ranks"
        targets.append(Target(what, grown, f"{wanted} +- 5 %", met))
    return targets


def stages_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="2 hosts, one core each: over the longer of codec and bytes")
    for column in ("compressor", "link", "half, ms", "what", "ms", "over it"):
        table.add_column(column, justify="left" if column in ("compressor", "what") else "right")
    names = {"1": "one tensor", "5": "five tensors", "floor": "codec beside torch's transfer"}
    for row in rows:
        half, whole = (f"{1e3 * row[key]:.1f}" for key in ("longer", "seconds"))
        over = f"{row['seconds'] / row['longer']:.2f}"
        table.add_row(row["spec"], row["link"], half, names[row["name"]], whole, over)
    return table


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    dense = rows[0]["seconds"]
    for column in (
        "candidate",
        "ms",
        "lowest",
        "x dense",
        "MB reported",
        "counted",
        "enc/net/dec ms",
    ):
        table.add_column(column, justify="left" if column == "candidate" else "right")
    for row in rows:
        parts = "/".join(f"{1e3 * row[kind]:.0f}" for kind in ("encode", "network", "decode"))
        cells = (f"{1e3 * row['seconds']:.1f}", f"{1e3 * row['lowest']:.1f}")
        cells += (f"{dense / row['seconds']:.2f}", f"{row['reported_bytes'] / 1e6:.3f}")
        table.add_row(row["name"], *cells, f"{row['counted_bytes'] / 1e6:.3f}", parts)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, default=4, help="hosts of the slow network (4)")
    parser.add_argument("--link", default="100mbit", help="rate of each host's link (100mbit)")
    parser.add_argument("--size", default="10M", help="elements of the tensor (10M)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds to take the median of (7)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a rank (1)")
    parts = ("slow", "stages", "loopback", "small", "growth")
    parser.add_argument("--only", choices=parts, help="one part alone")
    options = read_options(parser)
    if options.as_rank:
        job = json.loads(Path(options.as_rank).read_text())
        (rank_stages if job.get("stages") else rank_main)(job)
        return 0
    console = Console()
    job = {"numel": read_count(options.size), "rounds": options.rounds, "threads": options.threads}
    job["loopback"] = True
    targets: list[Target] = []
    record: dict[str, Any] = {}
    if options.only in (None, "slow"):
        lab = Lab(options.hosts, options.link)
        rows = measure("slow network", lab, {**job, "runs": SLOW, "loopback": False}, console)
        record["slow"] = rows
        targets += slow_targets(rows, parse_rate(options.link))
        console.print(table_of(f"{options.hosts} hosts, {options.link}", rows))
    if options.only in (None, "stages"):
        record["stages"], found_targets = stages(job, console)
        targets += found_targets
        console.print(stages_table(record["stages"]))
    if options.only in (None, "loopback"):
        more = {**job, "rounds": 3 * options.rounds, "runs": LOOPBACK}
        rows = measure("loopback", Loopback(4), more, console)
        record["loopback"] = rows
        over = rows[1]["seconds"] / rows[0]["seconds"]
        targets.append(Target("none: time over dist.all_reduce", over, "<= 1.2", over <= 1.2))
        console.print(table_of("4 ranks on loopback", rows))
    if options.only in (None, "small"):
        record["small"] = {}
        for ranks in (2, 4):
            less = {**job, "numel": SMALL_NUMEL, "rounds": SMALL_ROUNDS, "runs": SMALL}
            rows = measure(f"small, {ranks} ranks", Loopback(ranks), less, console)
            record["small"][str(ranks)] = rows
            console.print(table_of(f"{ranks} ranks on loopback, {SMALL_NUMEL} elements", rows))
            for row in rows[1:]:
                which = f"{row['name']}, {SMALL_NUMEL:,} elements, {ranks} ranks"
                over = row["seconds"] / rows[0]["seconds"]
                targets.append(Target.at_most(f"{which}: time over dist.all_reduce", over, 1.5))
    if options.only in (None, "growth"):
        found = {}
        for ranks in (2, 3, 4, 8):
            less = {**job, "numel": job["numel"] // 10, "rounds": 1, "runs": GROWTH}
            found[ranks] = measure(f"{ranks} ranks", Loopback(ranks), less, console)
        record["growth"] = {str(ranks): rows for ranks, rows in found.items()}
        targets += growth_targets(found)
    return conclude(console, options, "thinwire.collectives/1", record, targets)


if __name__ == "__main__":
    sys.exit(main())
