"""The hierarchical collective against flat ones, between racks with a slow link.

    python benchmarks/hierarchical.py [--racks 2] [--hosts 4] [--link 1gbit] [--inter 20mbit]
                                      [--size 5M] [--rounds 5] [--out benchmarks/records/NAME.json]

Hosts in network namespaces, fast links inside racks and a slow one between them. A step is an
all_reduce with a residual; all candidates take turns in every round. Figures are medians over
rounds of the slowest rank; bytes are those that crossed between the racks, counted at the bridge,
in the direction that carried more. All ranks share this machine's cores.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from harness import Target, conclude, read_options
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire.formatting import read_count

LIMIT = 3600.0  # seconds for all
NODES = "hierarchical"


class Candidate(NamedTuple):
    """One way to take a step."""

    spec: str
    collective: str
    inner: str = "none"

    @property
    def name(self) -> str:
        inside = f", {self.inner} inside" if self.inner != "none" else ""
        return f"{self.spec} {self.collective}{inside}"


def candidates(options: argparse.Namespace) -> list[Candidate]:
    found = []
    for spec in options.compressors:
        rival = "sparse" if spec.startswith("topk") else "twoshot"
        found += [Candidate(spec, flat) for flat in ("auto", "gather", rival)]
        found += [Candidate(spec, NODES, inner) for inner in options.inner]
    return found


def rank_main(job: dict[str, Any]) -> None:
    """What runs on each rank: rank 0 prints a line after each step and waits to be let go on."""
    import torch
    import torch.distributed as dist

    import thinwire as tw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(job["numel"], generator=generator) for _ in range(2)]
    tensor, go = torch.empty(job["numel"]), Path(job["go"])
    ways = [Candidate(*each) for each in job["candidates"]]
    residuals = {way: torch.zeros(job["numel"]) for way in ways}
    steps = 0
    for turn in range(-1, job["rounds"]):  # the first compiles and connects
        for way in ways:
            tensor.copy_(gradients[turn % 2])
            nodes = tw.Nodes(size // job["racks"], inner=way.inner)
            dist.barrier()
            begin = time.perf_counter()
            handle = tw.all_reduce(
                tensor,
                way.spec,
                residual=residuals[way],
                collective=way.collective,
                nodes=nodes if way.collective == NODES else None,
            )
            seconds = time.perf_counter() - begin
            account = handle.account
            parts = [account.seconds.get(kind, 0.0) for kind in ("encode", "network", "decode")]
            mine = torch.tensor([seconds, account.between_bytes, *parts], dtype=torch.float64)
            table = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(table, mine)
            steps += 1
            if rank == 0:
                rows = torch.stack(table)
                row = {
                    "name": way.name,
                    "used": handle.collective,
                    "turn": turn,
                    "seconds": rows[:, 0].max().item(),
                    "between_reported": rows[:, 1].sum().item() / job["racks"],
                    "encode": rows[:, 2].mean().item(),
                    "network": rows[:, 3].mean().item(),
                    "decode": rows[:, 4].mean().item(),
                }
                print(json.dumps(row), flush=True)
                while not (go.exists() and int(go.read_text() or 0) >= steps):
                    time.sleep(0.002)
            dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Rows of medians, one for each candidate."""
    from thinwire.lab import Lab

    ways = candidates(options)
    found: dict[str, list[dict[str, Any]]] = {way.name: [] for way in ways}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(options.hosts, options.link, racks=options.racks, inter=options.inter) as lab,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        go = Path(folder, "go")
        job = {
            "numel": read_count(options.size),
            "rounds": options.rounds,
            "racks": options.racks,
            "candidates": ways,
            "go": str(go),
        }
        task = progress.add_task("connecting")
        last, steps = lab.inter_counters(), 0

        def on_line(host: int, stream: str, line: str) -> None:
            nonlocal last, steps
            if (host, stream) != (0, "stdout") or not line.startswith("{"):
                return
            row = json.loads(line)
            counted, steps = lab.inter_counters(), steps + 1
            moved = [end - begin for end, begin in zip(counted, last, strict=True)]
            row["between_counted"] = max(each.sent_bytes for each in moved)
            row["dropped"] = sum(each.dropped_packets for each in moved)
            last = counted
            progress.update(task, description=f"round {row['turn'] + 1}, {row['name']}")
            if row["turn"] >= 0:
                found[row["name"]].append(row)
            written = go.with_suffix(".new")
            written.write_text(str(steps))
            written.rename(go)

        file = Path(folder, "job.json")
        file.write_text(json.dumps(job))
        lab.run([sys.executable, __file__, "--as-rank", str(file)], timeout=LIMIT, on_line=on_line)
    rows = []
    for name, measured in found.items():
        keys = [key for key in measured[0] if key not in ("name", "used", "turn")]
        row = {key: statistics.median(each[key] for each in measured) for key in keys}
        times = [each["seconds"] for each in measured]
        used = measured[0]["used"]
        rows.append(
            {"name": name, "used": used, **row, "lowest": min(times), "highest": max(times)}
        )
    return rows


def targets_of(rows: list[dict[str, Any]], specs: list[str]) -> list[Target]:
    targets = []
    for spec in specs:
        own = {row["name"]: row for row in rows if row["name"].startswith(f"{spec} ")}
        flat = [row for row in own.values() if row["used"] != NODES]
        best = min(
            (row for row in own.values() if row["used"] == NODES), key=lambda row: row["seconds"]
        )
        speed = own[f"{spec} auto"]["seconds"] / best["seconds"]
        targets.append(
            Target(f"{best['name']}: times faster than flat auto", speed, ">= 1.8", speed >= 1.8)
        )
        speed = min(row["seconds"] for row in flat) / best["seconds"]
        targets.append(
            Target(f"{best['name']}: times faster than the best flat", speed, ">= 1", speed >= 1)
        )
        # The counter also has headers of packets, acknowledgements and the meetings.
        share = best["between_reported"] / best["between_counted"]
        met = 0.8 <= share <= 1.0
        targets.append(Target(f"{spec}: bytes reported / counted", share, "0.8 to 1", met))
    return targets


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for column in ("candidate", "used", "ms", "lowest", "MB between", "reported", "enc/net/dec ms"):
        left = column in ("candidate", "used")
        table.add_column(column, justify="left" if left else "right")
    for row in rows:
        parts = "/".join(f"{1e3 * row[kind]:.0f}" for kind in ("encode", "network", "decode"))
        reported = f"{row['between_reported'] / 1e6:.3f}" if row["between_reported"] else "-"
        table.add_row(
            row["name"],
            row["used"],
            f"{1e3 * row['seconds']:.0f}",
            f"{1e3 * row['lowest']:.0f}",
            f"{row['between_counted'] / 1e6:.3f}",
            reported,
            parts,
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--racks", type=int, default=2, help="racks, which are the nodes (2)")
    parser.add_argument("--hosts", type=int, default=4, help="hosts in all racks (4)")
    parser.add_argument("--link", default="1gbit", help="rate inside racks (1gbit)")
    parser.add_argument("--inter", default="20mbit", help="rate between racks (20mbit)")
    parser.add_argument("--size", default="5M", help="elements of the tensor (5M)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take the median of (5)")
    parser.add_argument(
        "--compressors", nargs="+", default=["topk:0.01", "quantize:4"], help="specs to try"
    )
    parser.add_argument(
        "--inner",
        nargs="+",
        default=["none", "cast:bf16", "quantize:8"],
        help="specs to try inside racks",
    )
    options = read_options(parser)
    if options.as_rank:
        rank_main(json.loads(Path(options.as_rank).read_text()))
        return 0
    console = Console()
    rows = measure(options, console)
    title = f"{options.hosts} hosts in {options.racks} racks, {options.link} inside, "
    console.print(table_of(f"{title}{options.inter} between, {options.size}", rows))
    targets = targets_of(rows, options.compressors)
    return conclude(console, options, "thinwire.hierarchical/1", rows, targets)


if __name__ == "__main__":
    sys.exit(main())
