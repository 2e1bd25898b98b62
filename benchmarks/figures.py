"""Write the figures of README.md and of pages in docs from the records.

    python benchmarks/figures.py            write them (make figures)
    python benchmarks/figures.py --check    only say which blocks differ from the records

A block in a document stands between ``<!-- figures NAME -->`` and ``<!-- /figures -->``; everything
in it comes from the newest record of a family. The family of a record is its file name before the
date: a new record takes the place of the old one by being newer, and nothing here has to be edited.
"""

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from policies import TURN

from thinwire.formatting import show_rate
from thinwire.lab.topology import parse_rate

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / page
        for page in (
            *("benchmarks.md", "guides/policies.md", "plan.md", "reference/methods/arc.md"),
        )
    ),
)
BLOCK = re.compile(r"(<!-- figures ([\w-]+) -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
_FILES = re.compile(r" --(?:out|progress|picture) \S+")
_DATED = re.compile(r"(.+?)-(\d{4}-\d\d-\d\d)(.*)")


class Record(NamedTuple):
    path: Path
    family: str
    data: dict[str, Any]

    @property
    def head(self) -> dict[str, Any]:
        """Where date, machine and versions stand."""
        found: dict[str, Any] = self.data if "date" in self.data else self.data["bench"]
        return found

    @property
    def measured(self) -> Any:
        return self.data.get("measured", self.data)

    @property
    def bench(self) -> dict[str, Any]:
        """The document of `thinwire bench` in a record of the compressors' targets."""
        found: dict[str, Any] = self.measured["bench"]
        return found

    @property
    def commit(self) -> str:
        """As far as it is known: older records read it when they were written."""
        started = self.data.get("started")
        if started:
            return f"{started['commit']}{' and uncommitted code' if started['dirty'] else ''}"
        return str(self.head["versions"]["commit"]).replace("-dirty", " and uncommitted code")

    @property
    def command(self) -> str:
        """Without the names of files that it wrote, which are nobody else's."""
        given = self.data.get("started", {}).get("command")
        command = str(given or self.data.get("settings", {}).get("command") or "")
        return _FILES.sub("", command)

    def setting(self, name: str) -> str:
        """What an argument of the run was."""
        return str(self.data["settings"][name])


def all_records() -> list[Record]:
    found = []
    for path in sorted(RECORDS.glob("*.json")):
        name = _DATED.fullmatch(path.stem)
        if name is None:
            raise SystemExit(f"{path.name}: expected NAME-YYYY-MM-DD.json")
        found.append(Record(path, name[1], json.loads(path.read_text())))
    return found


def newest() -> dict[str, Record]:
    """By family."""
    return {r.family: r for r in sorted(all_records(), key=lambda r: r.head["date"])}


# Words and tables


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [
        f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in lines
    ]


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """The mean, and in parentheses how far the values lie apart."""
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):{form}} to {max(values):{form}})"


def between(value: float, lowest: float, highest: float, form: str = ".0f") -> str:
    return f"{value:{form}} ({lowest:{form}} to {highest:{form}})"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 20 else f"{value:.0f}"


def rate(text: str) -> str:
    """A rate as one writes it; what is none, as loopback, stays."""
    try:
        return show_rate(parse_rate(text))
    except ValueError:
        return text


def of_all(values: Sequence[float], form: str = ".0f") -> str:
    """The median, and how far the values lie apart."""
    if len(values) == 1:
        return format(values[0], form)
    return between(statistics.median(values), min(values), max(values), form)


def machine_of(record: Record) -> str:
    there, versions = record.head["machine"], record.head["versions"]
    return f"{there['cpu']}, {there['cores']} cores, torch {versions['torch']}"


def source(record: Record, page: Path, command: str) -> list[str]:
    """Where figures come from: the command, the record, the machine, what to know of the run."""
    link = os.path.relpath(record.path, page.parent)
    line = (
        f"`{record.command or command}`; [record]({link}) of {record.head['date'][:10]}, commit "
        f"{record.commit}; {machine_of(record)}."
    )
    notes = [f"{note[0].upper()}{note[1:].rstrip('.')}." for note in record.head.get("notes", [])]
    return ["", " ".join([line, *notes])]


def code(method: str) -> str:
    return f"`{method.replace('+ef14', '')}`" + (" + EF14" if method.endswith("+ef14") else "")


# Comparisons


def title_of(method: dict[str, Any], baseline: str) -> str:
    if method["name"] == baseline:
        return "plain DDP, fp32"
    if method["kind"] == "torch":
        return f"torch's {method['name'].removeprefix('torch:')} hook"
    return code(method["name"])


def comparison_rows(
    document: dict[str, Any], names: Sequence[str] | None = None
) -> list[list[str]]:
    rows = []
    for method in document["methods"]:
        if names is not None and method["name"] not in names:
            continue
        found, title = method["summary"], title_of(method, document["baseline"])
        if not found:
            error = (method["error"] or "failed").splitlines()[0]
            error = error.partition(":")[0] if len(error) > 40 else error
            rows.append([title, f"fails: {error}", "", "", "", "", ""])
            continue
        metric, target = found["final_metric"], found["to_target"]
        rows.append(
            [
                title,
                f"{metric['mean']:.2f} ({metric['lowest']:.2f} to {metric['highest']:.2f})"
                if metric["lowest"] != metric["highest"]
                else f"{metric['mean']:.2f}",
                of_all([1000 * run["step_seconds"] for run in method["runs"]]),
                f"{target['seconds']:.0f} s" if target else "not reached",
                times(target["speedup"]) if target else "",
                f"{found['megabytes_a_step']:.3f}",
                times(found["fewer_bytes"]),
            ]
        )
    return rows


def comparison(record: Record) -> list[str]:
    document, settings = record.data, record.data["settings"]
    columns = (
        *("gradients", settings["metric"], "ms per step"),
        *("DDP's final loss (within 2 %) after", "times sooner", "MB per step", "times fewer"),
    )
    lines = table(columns, comparison_rows(document))
    lines += ["", f"{settings['hosts']} hosts, links of {rate(settings['links'][0])}, "]
    lines[-1] += f"{settings['parameters']:,} parameters, {settings['steps']} steps, "
    lines[-1] += f"{len(settings['seeds'])} seed{'s' * (len(settings['seeds']) > 1)}."
    if document["sweep"]:
        ours = [m["name"] for m in document["methods"] if m["kind"] != "torch" and m["summary"]]
        rows = []
        for entry in document["sweep"]:
            step = entry["step_seconds"]
            known = {name: step[name] for name in ours if step.get(name)}
            best = min(known, key=known.__getitem__)
            gain = step[document["baseline"]] / known[best]
            rows.append([rate(entry["link"]), f"{1000 * step[document['baseline']]:.0f}"])
            hook = step.get("torch:powersgd")
            rows[-1] += [f"{1000 * hook:.0f}" if hook else "", code(best)]
            rows[-1] += [f"{1000 * known[best]:.0f}", f"{gain:.2f}"]
        lines += ["", "By the rate of the links:", ""]
        sweep_columns = (
            *("link", "plain DDP, ms per step", "torch's powersgd hook, ms", "best of ours"),
            *("ms per step", "times faster than DDP"),
        )
        lines += table(sweep_columns, rows)
    return lines


def front(records: dict[str, Record], page: Path) -> list[str]:
    """The README's table: plain DDP, torch's hooks, the two of ours that are soonest."""
    record = records["compare-images"]
    document = record.data
    ours = [m for m in document["methods"] if m["kind"] != "torch" and m["summary"]]
    reached = [m for m in ours if m["summary"]["to_target"]]
    reached.sort(key=lambda m: m["summary"]["to_target"]["seconds"])
    torch_ran = [m["name"] for m in document["methods"] if m["kind"] == "torch" and m["summary"]]
    names = [*torch_ran[:3], *(m["name"] for m in reached[:2])]
    rows = [[row[0], row[1], row[3], row[4], row[6]] for row in comparison_rows(document, names)]
    columns = (
        *("gradients", document["settings"]["metric"], "DDP's final loss after"),
        *("times sooner", "times fewer bytes"),
    )
    settings, link = document["settings"], os.path.relpath(record.path, page.parent)
    share = statistics.fmean(
        run["split"]["network"] / sum(run["split"].values())
        for method in document["methods"]
        if method["name"] == document["baseline"]
        for run in method["runs"]
    )
    text = (
        f"A CNN of {settings['parameters']:,} parameters under SGD, {settings['hosts']} hosts, "
        f"links of {rate(settings['links'][0])}, where plain DDP spends {100 * share:.0f} % of a "
        "step on the network; "
        f"{settings['steps']} steps, means of {len(settings['seeds'])} seeds ([record]({link}))."
    )
    lines = [*table(columns, rows), "", text]
    if "compare-text-10mbit" in records:
        lines += ["", adam_sentence(records["compare-text-10mbit"], records["local"], page)]
    return lines


def adam_sentence(record: Record, longer: Record, page: Path) -> str:
    """
    Args:
        longer: the study of longer trainings.
    """
    document, settings = record.data, record.data["settings"]
    reached = {
        m["name"]: m
        for m in document["methods"]
        if m["summary"] and m["summary"]["to_target"] and m["name"] != document["baseline"]
    }
    ours = [m for m in reached.values() if m["kind"] != "torch"]
    best = max(ours, key=lambda m: m["summary"]["to_target"]["speedup"])
    text = (
        f"A transformer of {settings['parameters']:,} parameters under AdamW at "
        f"{rate(settings['links'][0])}: {code(best['name'])} reaches DDP's final loss "
        f"{times(best['summary']['to_target']['speedup'])} times sooner"
    )
    hooks = [m for m in reached.values() if m["kind"] == "torch"]
    if hooks:
        other = max(hooks, key=lambda m: m["summary"]["to_target"]["speedup"])
        gain = times(other["summary"]["to_target"]["speedup"])
        text += f", {title_of(other, '')} {gain} times"
    seeds = len(settings["seeds"])
    link = os.path.relpath(record.path, page.parent)
    text += f" ({settings['steps']} steps, {seeds} seed{'s' * (seeds > 1)}, [record]({link}))."
    rows = {row["method"]: statistics.fmean(row["nll"]) for row in longer.measured["trained"]}
    if best["name"] in rows:
        above = 100 * (rows[best["name"]] / next(iter(rows.values())) - 1)
        other = os.path.relpath(longer.path, page.parent)
        text += f" Over 600 steps {code(best['name'])} ended {above:.0f} % above DDP's loss "
        text += f"([record]({other}))."
    return text


# The other studies


def methods(record: Record) -> list[str]:
    # Earlier records had four ranks, and nothing else that differed.
    usual = {"ranks": 4, "steps": None, "granularity": "bucket"}
    rows = [usual | row for row in record.measured]
    first = rows[0]
    form = ".1f" if "accuracy" in first["unit"] else ".3f"
    # Compared with the dense training of the same workload, by the same ranks.
    dense: dict[tuple[str, int], float] = {}
    for row in rows:
        dense.setdefault((row["workload"], row["ranks"]), row["megabytes_a_step"])
    lines = []
    for row in rows:
        where = [row["workload"].partition(":")[2].replace("_", " ").replace(",", ", ")]
        where += [f"{row['ranks']} ranks"] if row["ranks"] != first["ranks"] else []
        where += [f"{row['steps']} steps"] if row["steps"] != first["steps"] else []
        where += ["tensor by tensor"] if row["granularity"] != first["granularity"] else []
        lines.append(
            [
                ", ".join([f"`{row['method']}`", *filter(None, where)]),
                spread(row["metric"], form),
                str(len(row["metric"])),
                f"{row['megabytes_a_step']:.4f}",
                times(dense[row["workload"], row["ranks"]] / row["megabytes_a_step"]),
            ]
        )
    return [
        *table(("method", first["unit"], "seeds", "MB per step", "times fewer"), lines),
        "",
        f"{first['ranks']} ranks and {first['steps']} steps where a row does not say otherwise; "
        "all rows of a seed begin with the same model and see the same batches.",
    ]


def method_costs(record: Record) -> list[str]:
    found: dict[str, list[float]] = {}
    for row in record.measured:
        found.setdefault(f"{row['method']} {row['collective']}".strip(), []).append(row["ms"])
    return [
        *table(
            ("method, collective", "ms per step, median (lowest to highest)"),
            ([f"`{name}`", of_all(ms)] for name, ms in found.items()),
        ),
        "",
        f"{record.setting('ranks')} hosts, links of {rate(record.setting('link'))}, "
        f"`{record.setting('model')}`, {record.setting('rounds')} steps of each in turn.",
    ]


ARC_STEPS = 300  # of the trainings that a time is given for


def arc_time(records: dict[str, Record], page: Path) -> list[str]:
    """Accuracy of sparsifiers beside what their steps take in a lab with as many hosts."""
    rows, trained = [], {}
    for study in ("methods-images", "arc-images"):  # the latter counts where both have a row
        for row in records[study].measured:
            if row["workload"] == "images":
                name = row["method"].replace(",row=128,width=2", "")  # the defaults
                trained[name, row["ranks"]] = row
    for ranks in (4, 8):
        timed: dict[tuple[str, str], list[float]] = {}
        for row in records[f"arc-cost-{ranks}"].measured:
            timed.setdefault((row["method"], row["collective"]), []).append(row["ms"])
        for (method, collective), ms in timed.items():
            own = trained.get((method if method == "ddp" else f"{method}+ef14", ranks))
            if own is None or collective == "gather":
                continue
            middle = statistics.median(ms)
            rows.append(
                [
                    str(ranks),
                    f"`{method}`",
                    spread(own["metric"]),
                    f"{own['megabytes_a_step']:.3f}",
                    of_all(ms),
                    f"{ARC_STEPS * middle / 1e3:.0f}",
                ]
            )
    columns = (
        *("ranks", "EF14", "test accuracy, %", "MB per step", "ms per step (lowest to highest)"),
        f"s for {ARC_STEPS} steps",
    )
    sources = []
    for name in ("arc-images", "methods-images", "arc-cost-4", "arc-cost-8"):
        sources += source(records[name], page, "")[1:]
    link = rate(records["arc-cost-4"].setting("link"))
    return [*table(columns, rows), "", f"Links of {link}.", "", "\n\n".join(sources)]


def collectives(record: Record) -> list[str]:
    rows = record.measured["slow"]
    dense = rows[0]["seconds"]
    slow = table(
        ("all-reduce", "ms, median (lowest to highest)", "times faster", "MB on each link"),
        (
            [
                f"`{row['name']}`",
                between(1e3 * row["seconds"], 1e3 * row["lowest"], 1e3 * row["highest"]),
                times(dense / row["seconds"]),
                f"{row['counted_bytes'] / 1e6:.1f}",
            ]
            for row in rows
        ),
    )
    setting = (
        f"{record.setting('hosts')} hosts, links of {rate(record.setting('link'))}, a tensor of "
        f"{record.setting('size')} float32 elements, {record.setting('rounds')} rounds. A floor is "
        "what torch alone takes to move frames as long, with `isend`, `irecv` and its all-gather, "
        "adding nothing up; for `topk` the choice comes before."
    )
    return [*slow, "", setting, "", f"{ONE_CORE}:", "", *stages(record.measured["stages"])]


ONE_CORE = (
    "Two hosts of one core each, with links on which a message takes as long as compressing and "
    "adding up. The floor is all that computing while torch alone moves the same bytes, neither "
    "waiting for the other"
)


def stages(rows: list[dict[str, Any]]) -> list[str]:
    names = {"1": "one tensor of 40 MB", "5": "five tensors of 8 MB", "floor": "floor"}
    return table(
        (
            "compressor",
            "link",
            "exchange",
            "ms, median (lowest to highest)",
            "over the longer half",
        ),
        (
            [
                f"`{row['spec']}`",
                rate(row["link"]),
                names[row["name"]],
                between(1e3 * row["seconds"], 1e3 * row["lowest"], 1e3 * row["highest"]),
                f"{row['seconds'] / row['longer']:.2f}",
            ]
            for row in rows
        ),
    )


def hierarchical(record: Record) -> list[str]:
    lines = table(
        ("all-reduce", "ms, median (lowest to highest)", "MB between racks"),
        (
            [
                f"`{row['name']}`",
                between(1e3 * row["seconds"], 1e3 * row["lowest"], 1e3 * row["highest"]),
                f"{row['between_counted'] / 1e6:.2f}",
            ]
            for row in record.measured
        ),
    )
    racks, hosts = int(record.setting("racks")), int(record.setting("hosts"))
    setting = (
        f"{racks} racks of {hosts // racks} hosts, {rate(record.setting('link'))} inside and "
        f"{rate(record.setting('inter'))} between them, a tensor of {record.setting('size')} "
        f"float32 elements, {record.setting('rounds')} rounds."
    )
    return [*lines, "", setting]


# What else the record has bears on how we choose, not on what an exchange takes.
DISTANT = (
    *("dist.all_reduce", "isend/irecv", "none", "topk:0.01", "quantize:4"),
    *("quantize:4 by gather", "four settings, one exchange", "four settings, four exchanges"),
)


def wan(record: Record) -> list[str]:
    def cell(row: dict[str, Any]) -> str:
        times = between(1e3 * row["seconds"], 1e3 * row["lowest"], 1e3 * row["highest"])
        return f"{times}; {row['round_trips']:.1f}"

    found = record.measured
    sizes = list(dict.fromkeys(row["num_bytes"] for row in found["rows"]))
    cells = {(r["hosts"], r["name"], r["num_bytes"]): cell(r) for r in found["rows"]}
    rows = [
        [str(hosts), f"`{name}`", *(cells[hosts, name, size] for size in sizes)]
        for hosts in dict.fromkeys(row["hosts"] for row in found["rows"])
        for name in DISTANT
    ]
    setting = "`net.ipv4.tcp_slow_start_after_idle`"
    pauses: dict[int, list[str]] = {}
    for row in found["pauses"]:
        own = pauses.setdefault(row["slow_start_after_idle"], [])
        own.append(f"{row['round_trips']:.1f}, {row['round_trips_after_idleness']:.1f}")
    columns = [f"{size:,} bytes" for size in sizes]
    return [
        *table(("hosts", "all-reduce", *columns), rows),
        "",
        f"Milliseconds, median (lowest to highest); round trips. Links of "
        f"{rate(record.setting('link'))}, {record.setting('delay').replace('ms', ' ms')} one way, "
        f"{record.setting('rounds')} rounds.",
        "",
        "After pauses of more than a second between exchanges TCP sends slowly again, unless it is "
        f"told not to. Round trips of `{found['pauses'][0]['name']}` between two hosts, in "
        "exchanges that follow each other and after a pause:",
        "",
        *table((setting, *columns), ([str(key), *own] for key, own in pauses.items())),
    ]


def compressors(record: Record) -> list[str]:
    group = record.bench["groups"][0]
    base = group["baseline"]
    lines = table(
        (
            *("compressor", "ratio", "encode, in passes of `r += g` (lowest to highest)"),
            *("times faster than eager PyTorch", "decode, in passes", "extra memory / tensor"),
        ),
        (
            [
                f"`{row['compressor']}`",
                f"{row['compression_ratio']:.1f}",
                between(
                    row["encode"]["passes"],
                    row["encode"]["lowest_seconds"] / base["median_seconds"],
                    row["encode"]["highest_seconds"] / base["median_seconds"],
                    ".1f",
                ),
                times(row["encode"]["speedup"]),
                f"{row['decode']['passes']:.1f}",
                "" if row["extra_memory"] is None else f"{row['extra_memory']:.2f}",
            ]
            for row in group["rows"]
        ),
    )
    return [
        *lines,
        "",
        f"{group['numel'] / 1e6:.1f} M {group['dtype']} elements with a residual, medians of "
        f"{base['rounds']} interleaved rounds; one pass of `r += g` takes "
        f"{1e3 * base['median_seconds']:.1f} ms "
        f"({1e3 * base['lowest_seconds']:.1f} to {1e3 * base['highest_seconds']:.1f}).",
    ]


def hook(record: Record) -> list[str]:
    overhead, pipeline = record.measured["overhead"], dict(record.measured["pipeline"])
    link = rate(pipeline.pop("link"))
    sent = statistics.median(pipeline.pop("bytes")) / 1e6

    def rows(found: dict[str, list[float]], base: float) -> list[list[str]]:
        return [
            [name, of_all([1e3 * each for each in values], ".1f"), f"{middle(values) / base:.3f}"]
            for name, values in found.items()
        ]

    middle = statistics.median
    longer = max(middle(pipeline["backward"]), middle(pipeline["exchange"]))
    timing = "ms, median (lowest to highest)"
    return [
        *table(
            ("a step of", timing, "over plain DDP"), rows(overhead, middle(overhead["plain DDP"]))
        ),
        "",
        f"2 ranks on loopback, 12 layers of 768 x 768, {record.setting('rounds')} rounds.",
        "",
        *table(
            (f"a step with `{record.setting('compressor')}`", timing, "over the longer one"),
            rows(pipeline, longer),
        ),
        "",
        f"2 hosts, links of {link}, at which an exchange takes as long as backward: {sent:.1f} MB "
        f'each way in 12 buckets; {record.setting("rounds")} rounds. "Both at a time" is what '
        "the hook does; below it where its time goes, some of it at the same time.",
    ]


def link_policy(record: Record) -> list[str]:
    phase = int(record.data["settings"]["phase"])
    rows = []
    for row in record.measured:
        last = row["rows"][2 * phase : 3 * phase]
        lossy = sum(step["now"] not in (["none"], ["None"]) for step in last)
        rows.append([f"`{row['policy']}`", f"{row['rows'][-1]['seconds']:.0f} s"])
        rows[-1].append(f"{lossy} of {len(last)}")
    return [
        *table(("policy", "the whole run", "steps compressed after the return"), rows),
        "",
        f"{record.setting('ranks')} hosts, one run of each; {phase} steps at "
        f"{rate(record.setting('fast'))}, {phase} at {rate(record.setting('slow'))}, {phase} at "
        f"{rate(record.setting('fast'))} again.",
    ]


def auto_policy(record: Record) -> list[str]:
    """A row for plain DDP, for the fastest fixed strength and for each kind of `auto`."""
    links = list(dict.fromkeys(cell["link"] for cell in record.measured))
    rows = []
    for workload in dict.fromkeys(cell["workload"] for cell in record.measured):
        cells = {c["link"]: c["methods"] for c in record.measured if c["workload"] == workload}
        steps = {
            link: {row["method"]: 1e3 * row["step"] for row in methods}
            for link, methods in cells.items()
        }
        spreads = {
            (link, row["method"]): between(1e3 * row["step"], *_quartiles(row["seconds"]))
            for link, methods in cells.items()
            for row in methods
        }
        names = list(next(iter(steps.values())))
        plain = {"ddp": "plain DDP", "ddp again": "plain DDP, a second model"}
        shown = [n for n in names if n in plain or n == "none" or n.startswith("auto")]
        for name in shown:
            cells_of = [spreads.get((link, name), "") for link in links]
            rows.append([f"`{workload}`", plain.get(name, f"`{name}`"), *cells_of])
        best = []
        for link in links:
            fixed = {k: v for k, v in steps.get(link, {}).items() if k not in shown}
            name = min(fixed, key=lambda each: fixed[each]) if fixed else ""
            best.append(f"{code(name)}: {spreads[link, name]}" if fixed else "")
        rows.append([f"`{workload}`", "the fastest compressed one", *best])
    return [
        *table(("workload", "ms per step (middle half of turns)", *map(rate, links)), rows),
        "",
        f"{record.setting('ranks')} hosts; all methods take turns of {TURN} steps.",
    ]


def _quartiles(seconds: list[float]) -> tuple[float, float]:
    """Milliseconds between which the middle half of turns is."""
    means = [1e3 * statistics.fmean(seconds[i : i + TURN]) for i in range(0, len(seconds), TURN)]
    if len(means) < 2:
        return means[0], means[0]
    low, _, high = statistics.quantiles(means, n=4, method="inclusive")
    return low, high


def accuracy_policy(record: Record) -> list[str]:
    rows = []
    for row in record.measured:
        metrics = [step["metric"] for step in row["rows"] if step.get("metric") is not None]
        sent = statistics.fmean(step["bytes"] for step in row["rows"])
        rows.append([str(row["seed"]), f"`{row['policy']}`"])
        rows[-1] += [f"{metrics[-1]:.1f}" if metrics else "", f"{sent / 1e6:.4f}"]
    return table(("seed", "policy", "test accuracy, %", "MB per step"), rows)


def sharded(record: Record) -> list[str]:
    rows = []
    for part in ("fsdp", "hsdp"):
        found = record.measured.get(part) or []
        for row in found:
            each = row["all_seconds"]
            rows.append(
                [
                    part.upper(),
                    f"`{row['name']}`" if row["name"] != "plain" else "plain",
                    between(row["seconds"], min(each), max(each), ".2f"),
                    f"{row['bytes_counted'] / 1e6:.1f}",
                    times(found[0]["seconds"] / row["seconds"]),
                ]
            )
    link = rate(record.setting("link"))
    return [
        *table(
            ("model", "gradients", "s per step (lowest to highest)", "MB per step", "times faster"),
            rows,
        ),
        "",
        f"A transformer of about ten million parameters under AdamW, {record.setting('rounds')} "
        f"steps of each in turn. FSDP: four hosts, links of {link}. HSDP: two racks of two hosts, "
        f"{link} between them, replicas in each.",
    ]


def sharded_loss(record: Record) -> list[str]:
    found: dict[str, list[float]] = {}
    for row in record.measured["loss"]:
        found.setdefault(row["name"], []).append(row["nll"])
    return [
        *table(("gradients", "test nll"), ([f"`{k}`", spread(v, ".3f")] for k, v in found.items())),
        "",
        f"The text workload under AdamW, FSDP on four ranks, {record.setting('loss_steps')} steps, "
        f"{record.setting('seeds')} seeds.",
    ]


def local(record: Record) -> list[str]:
    rows = record.measured["trained"]
    dense = statistics.fmean(rows[0]["nll"])
    lines = table(
        ("method", "learning rate", "test nll", "above DDP, %", "times fewer bytes"),
        (
            [
                f"`{row['method']}`",
                f"{row['learning_rate']:g}",
                spread(row["nll"], ".3f"),
                f"{100 * (statistics.fmean(row['nll']) / dense - 1):.1f}",
                times(row["fewer"]),
            ]
            for row in rows
        ),
    )
    return [
        *lines,
        "",
        f"The text workload under AdamW, {record.setting('ranks')} ranks, "
        f"{record.setting('steps')} steps, {record.setting('seeds')} seeds. Each method tries the "
        f"same learning rates for {record.setting('tune_steps')} steps first, from a seed of its "
        "own.",
    ]


def federated(record: Record) -> list[str]:
    rows = []
    for row in record.measured:
        last = [curve[-1] for curve in row["curves"]]
        rows.append([f"`{row['method']}`", spread([point["accuracy"] for point in last])])
        rows[-1].append(f"{statistics.fmean(point['megabytes'] for point in last):.1f}")
    return [
        *table(("uploads", "test accuracy, %", "MB uploaded"), rows),
        "",
        f"{record.setting('rounds')} rounds, {record.setting('seeds')} seeds. `@0.9`: nine tenths "
        "of what a client left out stay for its next round.",
    ]


def torch_hooks(record: Record) -> list[str]:
    rows = []
    for row in record.measured:
        failure = " ".join(str(row.get("failure") or "").split())
        failure = failure.rpartition("running the callback: ")[2]  # what the wrappers say
        came = f"{row['metric']:.1f} %" if row.get("metric") is not None else f"`{failure[:100]}`"
        rows.append([row["name"], came])
    return [
        *table(("hook", "test accuracy, or what it raised"), rows),
        "",
        f"The images workload on loopback, {record.setting('ranks')} ranks, "
        f"{record.setting('steps')} steps, one seed.",
    ]


def others(record: Record) -> list[str]:
    rows = []
    for row in record.measured:
        if row.get("error"):
            rows.append([row["name"], row["error"], "", "", ""])
            continue
        timing = [
            between(*(1e3 * row[part][key] for key in ("median", "lowest", "highest")))
            for part in ("encode", "decode")
        ]
        rows.append([row["name"], *timing, f"{row['ratio']:.1f}", f"{row['relative_error']:.2g}"])
    parts = (f"{part}, ms (lowest to highest)" for part in ("encode", "decode"))
    return [
        *table(("codec", *parts, "ratio", "relative error"), rows),
        "",
        f"{record.setting('size')} float32 elements, {record.setting('rounds')} rounds.",
    ]


WAYS = {
    "ddp": "DDP",
    "fsdp": "FSDP (plain PyTorch first)",
    "local": "local steps, mean of a step over rounds",
}
WRONG, SLOWER = 0.25, 1.05  # errors in bold, and advice that is not right


def plan(record: Record) -> list[str]:
    """How far predictions are from labs: in all, and cell by cell."""
    rows, advice, lines = record.data["rows"], record.data["advice"], []
    figures = []
    for line in record.data["summary"]:
        cells = f"{line['right']} of {line['cells']}" if line["cells"] else ""
        figures.append(
            [
                line["way"] + (", cells that nothing was set by" if line["without_seen"] else ""),
                f"{line['times']}",
                f"{100 * line['median']:.0f} %",
                f"{line['near']}, {100 * line['near'] / line['times']:.0f} %",
                cells,
            ]
        )
    lines += table(("", "step times", "median error", "within 25 %", "advice right"), figures)
    verdicts = {each["cell"]: each for each in advice}
    for way, title in WAYS.items():
        own = [row for row in rows if row["way"] == way]
        if not own:
            continue
        found = []
        for cell in dict.fromkeys(row["cell"] for row in own):
            mine = [row for row in own if row["cell"] == cell]
            texts = [f"{1e3 * row['predicted']:.0f}/{1e3 * row['measured']:.0f}" for row in mine]
            texts = [
                f"**{text}**" if abs(row["error"]) > WRONG else text
                for row, text in zip(mine, texts, strict=True)
            ]
            seen = " (seen)" if mine[0]["seen"] else ""
            found.append([cell + seen, *texts, _verdict(verdicts.get(cell))])
        names = [row["method"] for row in own if row["cell"] == own[0]["cell"]]
        last = ["advice"] if way == "ddp" else []
        columns = ("cell", *names, *last)
        lines += ["", f"**{title}**: predicted / measured, milliseconds per step", ""]
        lines += table(columns, (row[: len(columns)] for row in found))
    missing = record.data.get("missing", [])
    if missing:
        lines += ["", f"Not measured yet: {'; '.join(missing)}."]
    return lines


def _verdict(advice: dict[str, Any] | None) -> str:
    if advice is None:
        return ""
    if advice["slower"] <= SLOWER:
        return f"{advice['advised']}: right"
    much = 100 * (advice["slower"] - 1)
    return f"**{advice['advised']}**: {advice['best']} is {much:.0f} % faster"


def costs(record: Record) -> list[str]:
    """How far predictions of single exchanges are off, by hosts and links."""
    found: dict[tuple[int, str], list[float]] = {}
    for row in record.measured["rows"]:
        error = row["predicted"] / row["seconds"] - 1
        found.setdefault((row["hosts"], row["link"]), []).append(error)
    return table(
        ("hosts", "link", "exchanges", "median error", "too short to too long"),
        (
            [
                f"{hosts}",
                rate(link),
                f"{len(errors)}",
                f"{100 * statistics.median(map(abs, errors)):.0f} %",
                f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %",
            ]
            for (hosts, link), errors in found.items()
        ),
    )


class Block(NamedTuple):
    """
    Args:
        draw: the lines of a record's table.
        command: for records that do not name theirs.
    """

    draw: Callable[[Record], list[str]]
    command: str


BLOCKS: dict[str, Block] = {
    "arc-images": Block(methods, "python benchmarks/methods.py --parts arc"),
    "arc-text": Block(methods, "python benchmarks/methods.py --workload text --parts arc"),
    "collectives": Block(collectives, "python benchmarks/collectives.py"),
    "compare-images": Block(comparison, "python benchmarks/compare.py"),
    "compare-text-10mbit": Block(comparison, "python benchmarks/compare.py --workload text"),
    "compare-text-100mbit": Block(comparison, "python benchmarks/compare.py --workload text"),
    "costs": Block(costs, "python benchmarks/costs.py"),
    "ddp": Block(hook, "python benchmarks/ddp.py"),
    "federated": Block(federated, "python benchmarks/federated.py"),
    "federated-200-rounds": Block(federated, "python benchmarks/federated.py --rounds 200"),
    "fsdp": Block(sharded, "python benchmarks/fsdp.py --parts fsdp hsdp"),
    "fsdp-loss": Block(sharded_loss, "python benchmarks/fsdp.py --parts loss"),
    "hierarchical": Block(hierarchical, "python benchmarks/hierarchical.py"),
    "hierarchical-8-hosts": Block(hierarchical, "python benchmarks/hierarchical.py --hosts 8"),
    "local": Block(local, "python benchmarks/local.py"),
    "local-gain": Block(local, "python benchmarks/local.py --methods ..."),
    "methods-cost-4": Block(method_costs, "python benchmarks/methods.py --cost"),
    "methods-cost-8": Block(method_costs, "python benchmarks/methods.py --cost --ranks 8"),
    "methods-images": Block(methods, "python benchmarks/methods.py --workload images"),
    "methods-text": Block(methods, "python benchmarks/methods.py --workload text"),
    "others": Block(others, "python benchmarks/others.py"),
    "plan": Block(plan, "python benchmarks/plan.py"),
    "policies-accuracy": Block(accuracy_policy, "python benchmarks/policies.py accuracy"),
    "policies-auto": Block(auto_policy, "python benchmarks/policies.py auto"),
    "policies-link": Block(link_policy, "python benchmarks/policies.py link"),
    "targets": Block(compressors, "python benchmarks/targets.py"),
    "torch-hooks": Block(torch_hooks, "python benchmarks/torch_hooks.py"),
    "wan": Block(wan, "python benchmarks/wan.py"),
}


def all_targets(records: dict[str, Record], page: Path) -> list[str]:
    """A row for each target of each newest record."""
    rows, met = [], 0
    for record in records.values():
        link = os.path.relpath(record.path, page.parent)
        for target in record.data.get("targets", []):
            met += target["met"]
            figure = target["figure"]
            rows.append(
                [
                    f"[{record.family}]({link})",
                    f"{target['what']}",
                    "not measured" if figure is None or figure != figure else f"{figure:.3g}",
                    target["bound"],
                    "met" if target["met"] else "**missed**",
                ]
            )
    rows.sort(key=lambda row: row[0])
    lines = table(("record", "what", "figure", "target", ""), rows)
    return [f"{met} of {len(rows)} are met.", "", *lines]


def all_sources(records: dict[str, Record], page: Path) -> list[str]:
    """Every record that is kept, superseded ones too."""
    rows = []
    for record in all_records():
        link = os.path.relpath(record.path, page.parent)
        block = BLOCKS.get(record.family)
        command = record.command or (block.command if block else "")
        newer = records[record.family].path != record.path
        rows.append(
            [
                f"[{record.path.stem}]({link})",
                f"`{command}`" if command else "",
                record.commit,
                machine_of(record),
                "an older one" if newer else "",
            ]
        )
    return table(("record", "command", "commit", "machine", ""), rows)


PAGE_BLOCKS: dict[str, Callable[[dict[str, Record], Path], list[str]]] = {
    "all-records": all_sources,
    "all-targets": all_targets,
    "arc-time": arc_time,
    "front": front,
}


def drawn(name: str, records: dict[str, Record], page: Path) -> list[str]:
    """The lines of a block. Raises KeyError for an unknown block or family."""
    if name in PAGE_BLOCKS:
        return PAGE_BLOCKS[name](records, page)
    block, record = BLOCKS[name], records[name]
    return [*block.draw(record), *source(record, page, block.command)]


def rewritten(page: Path, text: str, records: dict[str, Record]) -> str:
    """The text of a page with its figures as the records have them."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}\n{chr(10).join(drawn(found[2], records, page))}\n\n{found[4]}"

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if figures differ")
    options = parser.parse_args()
    records, changed = newest(), False
    for page in PAGES:
        text = page.read_text()
        new = rewritten(page, text, records)
        if new != text:
            changed = True
            print(f"{page.relative_to(ROOT)}: figures differ from the records", file=sys.stderr)
            if not options.check:
                page.write_text(new)
    return int(changed and options.check)


if __name__ == "__main__":
    sys.exit(main())
