"""What a comparison says, in words."""

from typing import Any

CLOSE = 0.01  # of the baseline's metric: what a method may cost and still be recommended
_WORTH = 1.1  # times faster: less is noise


def verdict_of(document: dict[str, Any]) -> str:
    """One or two sentences: what won, by how much, and at what price."""
    methods = document["methods"]
    base = next((m for m in methods if m["name"] == document["baseline"]), None)
    if base is None or not base["summary"]:
        return "There is nothing to compare with: plain DDP did not finish."
    rivals = [m for m in methods if m is not base and m["summary"] and not m["diverged"]]
    rivals = [m for m in rivals if not m["error"]]
    good = [m for m in rivals if is_close(document, m, base)]
    if not rivals:
        return "There is nothing to compare: no other method finished."
    best = max(good, key=lambda m: (m["summary"]["to_target"] is not None, _gain(m)), default=None)
    where = _where(document)
    if best is None or _gain(best) < _WORTH:
        share = _network_share(base)
        fastest = max(rivals, key=lambda m: m["summary"]["step_speedup"])
        what = "no method was faster" if good else "no method ended as well"
        speed = fastest["summary"]["step_speedup"]
        return (
            f"Compression does not pay here: on {where} {what}. Plain DDP spends {share:.0%} of a "
            f"step on the network; the fastest other method, {fastest['name']}, takes "
            f"{1 / speed:.2f} of its time a step."
        )
    return " ".join([_won(document, best, base, where), *_ends(document, best)])


def is_close(document: dict[str, Any], method: dict[str, Any], base: dict[str, Any]) -> bool:
    """Whether a method ends about as well as the baseline, or better."""
    mine, theirs = method["summary"]["final_metric"], base["summary"]["final_metric"]
    if mine is None or theirs is None:
        mine, theirs, higher = method["summary"]["final_loss"], base["summary"]["final_loss"], False
        if mine is None or theirs is None:
            return False
    else:
        higher = document["settings"]["higher_is_better"]
    lost = (theirs["mean"] - mine["mean"]) * (1 if higher else -1)
    return bool(lost <= CLOSE * abs(theirs["mean"]))


def _gain(method: dict[str, Any]) -> float:
    """How much sooner a method is done: by time to the loss if it was reached."""
    summary = method["summary"]
    gain: float = (summary["to_target"] or {"speedup": summary["step_speedup"]})["speedup"]
    return gain


def _won(document: dict[str, Any], best: dict[str, Any], base: dict[str, Any], where: str) -> str:
    mine, theirs = best["summary"], base["summary"]
    fewer = f" with {mine['fewer_bytes']:.0f}x fewer bytes" if mine["fewer_bytes"] else ""
    if mine["to_target"]:
        reached = mine["to_target"]
        text = (
            f"{best['name']} reached plain DDP's final loss {reached['speedup']:.1f}x sooner on "
            f"{where} ({_duration(reached['seconds'])} instead of "
            f"{_duration(theirs['to_target']['seconds'])})"
            f"{fewer}"
        )
    else:
        text = (
            f"{best['name']} took {mine['step_speedup']:.1f}x less time a step than plain DDP on "
            f"{where}{fewer}"
        )
    ours, other = mine["final_metric"], theirs["final_metric"]
    if ours is None or other is None:
        return f"{text}."
    name, _, unit = document["settings"]["metric"].partition(", ")
    unit = f" {unit}" if unit else ""
    ended = f"a {name} of {ours['mean']:.4g}{unit} (plain DDP {other['mean']:.4g})"
    return f"{text}, and ended at {ended}."


def _ends(document: dict[str, Any], best: dict[str, Any]) -> list[str]:
    """Where it stops paying, if that was looked at."""
    sweep = document["sweep"]
    gains = {
        entry["link"]: entry["step_seconds"][document["baseline"]] / own
        for entry in sweep
        if document["baseline"] in entry["step_seconds"]
        and (own := entry["step_seconds"].get(best["name"]))
    }
    if len(gains) < 2:
        return []
    told = ", ".join(f"{gain:.1f}x at {link}" for link, gain in gains.items())
    lost = [link for link, gain in gains.items() if gain < _WORTH]
    end = f" It no longer pays from {lost[0]} on." if lost else ""
    return [f"A step was faster {told}.{end}"]


def _network_share(base: dict[str, Any]) -> float:
    splits = [run["split"] for run in base["runs"]]
    share: float = sum(s["network"] / sum(s.values()) for s in splits) / len(splits)
    return share


def _where(document: dict[str, Any]) -> str:
    settings = document["settings"]
    links = list(dict.fromkeys(settings["links"]))
    text = f"{settings['hosts']} hosts with links of {' and '.join(links)}"
    if settings["inter"]:
        text += f" in {settings['racks']} racks joined by {settings['inter']}"
    return f"{text} (projected)" if settings["network"] == "projected" else text


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min"
