"""What single exchanges take, beside what the cost model says: where its constants come from.

    python benchmarks/costs.py [--hosts 2 4 8] [--links 10mbit 100mbit 1gbit] [--delay 15ms]
                               [--racks 2 --inter 50mbit] [--sizes 64KiB 512KiB 2MiB 8MiB 32MiB]
                               [--rounds 5] [--out benchmarks/records/NAME.json]

Hosts in network namespaces; nobody computes beside the exchanges. All ranks begin at the same time
by the clock that they share here, and a time is that of the rank that ends last: the median over
rounds, the first two left out, in which kernels are loaded and connections made. What is predicted
uses codecs measured on one core here, slower by as many times as hosts share a core. Sizes that
would take longer than --most seconds are left out.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from harness import conclude, read_options, run_ranks
from rich.console import Console
from rich.table import Table

from thinwire.collectives.costs import Coding, ExchangeCost, Interconnect, exchange_cost
from thinwire.compressors import compressor_of
from thinwire.formatting import read_bytes, show_bytes
from thinwire.lab import Lab, parse_rate
from thinwire.lab.topology import parse_time
from thinwire.policies.codecs import CodecTable

DENSE = "dense"
SPECS = (DENSE, "none", "quantize:8", "quantize:4", "topk:0.01", "topk:0.01|quantize:4")
WARM_UP = 2  # rounds
# Payload that all hosts of a lab send together, bytes per second: gloo, TCP and the lab's own links
# take two cores for it.
TOGETHER = 0.62e9


def rank_main(job: dict[str, Any]) -> None:
    """What runs on each rank: rank 0 prints a JSON line for every candidate, size and round."""
    import torch
    import torch.distributed as dist

    import thinwire as tw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    most = max(num_bytes for _, num_bytes in job["candidates"]) // 4
    gradient, room = torch.randn(most, generator=generator), torch.zeros(2, most)
    for turn in range(-WARM_UP, job["rounds"]):
        for spec, num_bytes in job["candidates"]:
            # Memory of before, as in a training: fresh pages would cost more than codecs.
            tensor, residual = room[:, : num_bytes // 4]
            tensor.copy_(gradient[: num_bytes // 4])
            residual.zero_()
            start = torch.tensor([time.monotonic() + job["lead"]], dtype=torch.float64)
            dist.broadcast(start, 0)
            time.sleep(max(0.0, start.item() - time.monotonic()))
            parts, collective = {}, ""
            if spec == DENSE:
                dist.all_reduce(tensor)
            else:
                handle = tw.all_reduce(tensor, spec, residual=residual)
                parts, collective = handle.account.seconds, handle.collective
            kinds = ("encode", "network", "decode")
            mine = [time.monotonic() - start.item(), *(parts.get(kind, 0.0) for kind in kinds)]
            table = [torch.empty(4, dtype=torch.float64) for _ in range(size)]
            dist.all_gather(table, torch.tensor(mine, dtype=torch.float64))
            if rank == 0:
                rows = torch.stack(table)
                row = {"spec": spec, "num_bytes": num_bytes, "turn": turn}
                row |= {"collective": collective, "seconds": rows[:, 0].max().item()}
                row |= dict(zip(kinds, rows[:, 1:].mean(0).tolist(), strict=True))
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def lab_network(
    table: CodecTable,
    hosts: int,
    link: str,
    delay: str | None = None,
    racks: int = 1,
    inter: str | None = None,
) -> Interconnect:
    """What lies between the hosts of a lab, with the software of a table."""
    return Interconnect(
        hosts=hosts,
        rate=parse_rate(link) / 8,
        delay=parse_time(delay) if delay else 0.0,
        racks=racks,
        uplink=parse_rate(inter) / 8 if inter else float("inf"),
        start=table.start,
        peer=table.peer,
        meeting=table.meeting,
        inside=table.inside,
        together=TOGETHER,
    )


def predicted(spec: str, numel: int, network: Interconnect, table: CodecTable) -> ExchangeCost:
    coding = Coding("plain") if spec == DENSE else table.coding(compressor_of(spec))
    return exchange_cost(coding, numel, network)


def measure(
    hosts: int, link: str, table: CodecTable, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of medians, one for each candidate and size, with what was predicted."""
    shared = table.shared(hosts, os.cpu_count() or 1)
    network = lab_network(shared, hosts, link, options.delay, options.racks, options.inter)
    costs = {
        (spec, size): predicted(spec, size // 4, network, shared)
        for size in map(read_bytes, options.sizes)
        for spec in options.specs
    }
    costs = {key: cost for key, cost in costs.items() if cost.seconds <= options.most}
    distance = {"delay": options.delay} if options.delay else {}
    racks = {"racks": options.racks, "inter": options.inter} if options.racks > 1 else {}
    lab = Lab(hosts, link, **distance, **racks)
    job = {"candidates": list(costs), "rounds": options.rounds}
    job["lead"] = 0.02 + 2 * lab.round_trip_seconds * max(1, hosts.bit_length() - 1)
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def heard(row: dict[str, Any]) -> None:
        if row["turn"] >= 0:
            found.setdefault((row["spec"], row["num_bytes"]), []).append(row)

    run_ranks(lab, __file__, job, heard)
    rows = []
    for (spec, size), own in found.items():
        cost = costs[spec, size]
        row = {"hosts": hosts, "link": link, "spec": spec, "num_bytes": size}
        row["collective"] = own[0]["collective"]
        for kind in ("seconds", "encode", "network", "decode"):
            row[kind] = statistics.median(each[kind] for each in own)
        row["lowest"], row["highest"] = (f(each["seconds"] for each in own) for f in (min, max))
        row["predicted"] = max(cost.seconds, cost.work)  # ranks share the cores
        rows.append(row)
    return rows


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="milliseconds of one exchange")
    names = ("hosts", "link", "tensor", "method", "collective", "measured", "predicted", "error")
    for name in (*names, "encode", "network", "decode"):
        table.add_column(name, justify="right" if name not in names[1:5] else "left")
    for row in rows:
        parts = [f"{1e3 * row[kind]:.1f}" for kind in ("encode", "network", "decode")]
        table.add_row(
            str(row["hosts"]),
            row["link"],
            show_bytes(row["num_bytes"]),
            row["spec"],
            row["collective"],
            f"{1e3 * row['seconds']:.1f}",
            f"{1e3 * row['predicted']:.1f}",
            f"{row['predicted'] / row['seconds'] - 1:+.0%}",
            *parts,
        )
    console.print(table)


def main() -> int:
    if sys.argv[1:2] == ["--as-rank"]:
        rank_main(json.loads(Path(sys.argv[2]).read_text()))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--links", nargs="+", default=["10mbit", "100mbit", "1gbit"])
    parser.add_argument("--sizes", nargs="+", default=["64KiB", "512KiB", "2MiB", "8MiB", "32MiB"])
    parser.add_argument("--specs", nargs="+", default=list(SPECS))
    parser.add_argument("--delay")
    parser.add_argument("--racks", type=int, default=1)
    parser.add_argument("--inter")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=float, default=1.0, help="seconds of an exchange")
    options = read_options(parser)
    console = Console(width=160)

    import torch

    from thinwire.bench.codecs import measure_codecs

    torch.set_num_threads(1)
    console.print("measuring codecs")
    table = measure_codecs([spec for spec in options.specs if spec != DENSE])
    rows = []
    for hosts in options.hosts:
        for link in options.links:
            console.print(f"{hosts} hosts, {link}")
            rows += measure(hosts, link, table, options)
    show(console, rows)
    measured = {"codecs": json.loads(table.to_json()), "rows": rows}
    return conclude(console, options, "thinwire.costs/1", measured)


if __name__ == "__main__":
    sys.exit(main())
