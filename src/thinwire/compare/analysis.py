"""From what ranks measured to the document of a comparison, and to its verdict in words.

All of it is arithmetic on lists; nothing here measures or runs.
"""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from thinwire.compare.counters import FULL
from thinwire.compare.document import (
    Document,
    DocumentSettings,
    MethodResult,
    MethodSummary,
    MetricPoint,
    Spread,
    StepSplit,
    SweepEntry,
    TensorFigures,
    TimeToTarget,
    TrainingRun,
)
from thinwire.compare.place import rate_of
from thinwire.compare.rank import RankRecord, typical_step
from thinwire.compare.settings import PARALLELISMS, distance_in_words
from thinwire.formatting import in_words, show_number, show_ratio, show_seconds
from thinwire.machine import machine

if TYPE_CHECKING:
    from thinwire.compare.run import Comparison, Outcome

NEAR = 0.02  # of the baseline's final loss: as near counts as there, for the baseline too
CLOSE = 0.01  # of the baseline's metric: what a method may cost and still be recommended
_BLOWN_UP = 2.0  # a loss that has risen by so many times that of the start has diverged
_WORTH = 1.1  # times faster: less is noise


def document_of(comparison: "Comparison", command: str, interrupted: bool) -> Document:
    """The document. `thinwire.report` draws it."""
    settings = comparison.settings
    outcomes = list(comparison.outcomes.values())
    document = Document(
        date=comparison.date,
        machine=machine()._asdict(),
        versions=comparison.versions,
        notes=comparison.notes,
        settings=DocumentSettings(
            workload=settings.workload,
            parallel=settings.parallel,
            weights=settings.weights,
            metric=comparison.metric,
            higher_is_better=comparison.higher_is_better,
            parameters=comparison.parameters,
            hosts=settings.hosts,
            links=list(settings.links),
            delay=settings.delay,
            jitter=settings.jitter,
            loss=settings.loss,
            racks=settings.racks,
            inter=settings.inter,
            network="projected" if comparison.projected else "lab",
            steps=settings.steps,
            seconds=settings.seconds,
            target=settings.target,
            seeds=list(settings.seeds),
            command=command,
        ),
        baseline=settings.parallel,
        methods=[_result(outcome, comparison.slowest) for outcome in outcomes],
        interrupted=interrupted,
    )
    summarise(document)
    document.sweep = _sweep(outcomes, document)
    document.verdict = verdict_of(document)
    return document


def _result(outcome: "Outcome", slowest: int | None) -> MethodResult:
    runs = [run_of(seed, ranks, slowest) for seed, ranks in outcome.runs.items()]
    return MethodResult(
        name=outcome.method.name,
        title=outcome.method.title,
        kind=outcome.method.kind,
        error=outcome.error,
        output=outcome.output,
        diverged=any(map(has_diverged, runs)),
        runs=runs,
    )


# One run


def run_of(seed: int, ranks: list[RankRecord], slowest: int | None) -> TrainingRun:
    """One training, from what each rank measured.

    Args:
        slowest: if times are projected, the bits per second of the slowest link.
    """
    steps = min(len(rank.losses) for rank in ranks)
    sent = [statistics.fmean(rank.num_bytes[i] for rank in ranks) for i in range(steps)]
    network = [8 * FULL * count / slowest if slowest else 0.0 for count in sent]
    seconds = [max(rank.seconds[i] for rank in ranks) + network[i] for i in range(steps)]
    losses = [statistics.fmean(rank.losses[i] for rank in ranks) for i in range(steps)]
    first = ranks[0]
    evaluations = [
        MetricPoint(
            step=step,
            seconds=seconds[step - 1],
            megabytes=sent[step - 1] / 1e6,
            value=_finite(value),
        )
        for step, value in first.evaluations
        if 0 < step <= steps
    ]
    typical = typical_step(seconds, first.in_rounds)
    reported = [rank.reported for rank in ranks if rank.reported is not None]
    return TrainingRun(
        seed=seed,
        steps=steps,
        losses=[round(loss, 6) if math.isfinite(loss) else None for loss in losses],
        seconds=[round(value, 4) for value in seconds],
        megabytes=[round(count / 1e6, 6) for count in sent],
        evaluations=evaluations,
        final_loss=trailing(losses)[-1] if all(map(math.isfinite, losses)) else None,
        final_metric=evaluations[-1].value if evaluations else None,
        step_seconds=typical,
        split=_split(ranks, seconds[-1] / steps, network[-1] / steps, typical),
        bytes_counted=round(sent[-1]),
        bytes_reported=round(statistics.fmean(reported)) if len(reported) == len(ranks) else None,
        tensors=[_tensor(row) for row in first.tensors],
    )


def _tensor(row: dict[str, Any]) -> TensorFigures:
    ratio, error = _finite(row["ratio"]), _finite(row["relative_error"])
    return TensorFigures.model_validate({**row, "ratio": ratio, "relative_error": error})


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _split(ranks: list[RankRecord], step: float, network: float, typical: float) -> StepSplit:
    """The seconds of a typical step, divided as those of all steps are on average.

    What backward did not hide is divided as the exchanges' own time.
    """
    exposed = min(step - network, statistics.fmean(rank.exposed for rank in ranks))
    encode, talk, decode = (
        statistics.fmean(rank.inside.get(kind, 0.0) for rank in ranks)
        for kind in ("encode", "network", "decode")
    )
    whole = encode + talk + decode
    if not whole:
        talk = whole = 1.0
    scale = typical / step if step else 1.0
    return StepSplit(
        compute=scale * (step - network - exposed),
        encode=scale * exposed * encode / whole,
        network=scale * (exposed * talk / whole + network),
        decode=scale * exposed * decode / whole,
    )


def window_of(steps: int) -> int:
    """How many steps a loss is averaged over: a batch's own loss says little."""
    return max(1, min(steps, max(5, steps // 10)))


def trailing(losses: Sequence[float]) -> list[float]:
    """Of each step, the mean of the last losses."""
    window = window_of(len(losses))
    return [statistics.fmean(losses[max(0, i + 1 - window) : i + 1]) for i in range(len(losses))]


def has_diverged(run: TrainingRun) -> bool:
    """Whether the loss became infinite, or ended far above where it began."""
    losses = run.finite_losses
    if losses is None or run.final_loss is None:
        return True
    return run.final_loss - losses[0] > _BLOWN_UP * max(abs(losses[0]), 1e-6)


def time_to(run: TrainingRun, loss: float) -> float | None:
    """Seconds until the trailing mean of the loss is as low; None if it never is.

    The first window is left out: a mean of fewer losses is noise.
    """
    losses = run.finite_losses
    if losses is None:
        return None
    window = window_of(run.steps)
    for i, value in enumerate(trailing(losses)):
        if i + 1 >= window and value <= loss:
            return run.seconds[i]
    return None


# All runs of a method


def summarise(document: Document) -> None:
    """Add target_loss and every method's summary."""
    base = document.base
    if base is not None and not base.runs:
        base = None
    document.target_loss = None
    if base is not None and not base.diverged:
        finals = [run.final_loss for run in base.runs if run.final_loss is not None]
        document.target_loss = statistics.fmean(finals)
    for method in document.methods:
        method.summary = summary_of(method, base, document.target_loss)


def summary_of(
    method: MethodResult, base: MethodResult | None, target_loss: float | None
) -> MethodSummary | None:
    """What all runs of a method come to, compared with the baseline."""
    runs = method.runs
    if not runs:
        return None
    step, sent = _step_seconds(runs), _megabytes_per_step(runs)
    found = MethodSummary(
        final_metric=_spread([run.final_metric for run in runs]),
        final_loss=_spread([run.final_loss for run in runs]),
        step_seconds=step,
        seconds=statistics.fmean(run.seconds[-1] for run in runs),
        megabytes_a_step=sent,
        fewer_bytes=None,
        step_speedup=None,
        to_target=None,
    )
    if base is not None:
        found.step_speedup = _step_seconds(base.runs) / step
        found.fewer_bytes = _megabytes_per_step(base.runs) / sent if sent else None
        if target_loss is not None:
            found.to_target = _to_target(runs, base.runs, target_loss)
    return found


def _step_seconds(runs: list[TrainingRun]) -> float:
    return statistics.median(run.step_seconds for run in runs)


def _megabytes_per_step(runs: list[TrainingRun]) -> float:
    return statistics.fmean(run.megabytes[-1] / run.steps for run in runs)


def _to_target(
    runs: list[TrainingRun], base: list[TrainingRun], loss: float
) -> TimeToTarget | None:
    """Time to within 2 % of the baseline's final loss, of the same seed where there is one.

    The baseline's own time is taken in the same way. None unless all runs get there.
    """

    def near(end: float) -> float:
        return end + NEAR * abs(end)  # above it also where losses are below zero

    ends = {run.seed: loss if run.final_loss is None else run.final_loss for run in base}
    theirs = [time_to(run, near(ends[run.seed])) for run in base]
    ours = [time_to(run, near(ends.get(run.seed, loss))) for run in runs]
    reached = [seconds for seconds in ours if seconds is not None]
    whole = [seconds for seconds in theirs if seconds is not None]
    if len(reached) < len(runs) or not whole:
        return None
    seconds = statistics.fmean(reached)
    return TimeToTarget(seconds=seconds, speedup=statistics.fmean(whole) / seconds)


def _spread(values: list[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(mean=statistics.fmean(known), lowest=min(known), highest=max(known))


def _sweep(outcomes: list["Outcome"], document: Document) -> list[SweepEntry]:
    """Step times by rate, slowest first, with those of the trainings among them."""
    found: dict[str, dict[str, float | None]] = {}
    for outcome in outcomes:
        for link, ranks in outcome.sweep.items():
            seconds = max(rank.step_seconds for rank in ranks)
            if document.projected:
                sent = statistics.fmean(rank.bytes_per_step for rank in ranks)
                seconds += 8 * FULL * sent / rate_of(link)
            found.setdefault(link, {})[outcome.method.name] = seconds
    same = set(document.settings.links)
    if found and len(same) == 1 and document.settings.racks == 1:
        found[same.pop()] = {
            method.name: method.summary.step_seconds
            for method in document.methods
            if method.summary
        }
    return [SweepEntry(link=link, step_seconds=found[link]) for link in sorted(found, key=rate_of)]


# The verdict


def verdict_of(document: Document) -> str:
    """One or two sentences: what won, by how much, and at what price."""
    base = document.base
    if base is None or base.summary is None:
        return f"There is nothing to compare with: {_plain(document)} did not finish."
    rivals = [
        (method, method.summary)
        for method in document.methods
        if method is not base and method.summary and not method.diverged and not method.error
    ]
    if not rivals:
        return "There is nothing to compare: no other method finished."
    good = [(m, s) for m, s in rivals if is_close(document, s, base.summary)]
    best = max(good, key=lambda each: (each[1].to_target is not None, _gain(each[1])), default=None)
    where = _where(document)
    if best is None or _gain(best[1]) < _WORTH:
        share = statistics.fmean(run.split.network / run.split.whole for run in base.runs)
        fastest, summary = max(rivals, key=lambda each: each[1].step_speedup or 0.0)
        what = "no method ended as well"
        if good:
            faster = max(each.step_speedup or 0.0 for _, each in good) >= _WORTH
            sooner = f"no method reached {_plain(document)}'s final loss sooner"
            what = sooner if faster else "no method was faster"
        return (
            f"Compression does not pay here: on {where} {what}. Of a step {_plain(document)} "
            f"spends {100 * share:.0f} % on the network; the fastest other method, {fastest.name}, "
            f"takes {1 / (summary.step_speedup or 1.0):.2f} times as long per step."
        )
    return " ".join([_won(document, *best, base.summary), *_ends(document, best[0])])


def is_close(document: Document, own: MethodSummary, base: MethodSummary) -> bool:
    """Whether a method ends about as well as the baseline, or better."""
    mine, theirs, higher = own.final_metric, base.final_metric, document.settings.higher_is_better
    if mine is None or theirs is None:
        mine, theirs, higher = own.final_loss, base.final_loss, False
    if mine is None or theirs is None:
        return False
    lost = (theirs.mean - mine.mean) * (1 if higher else -1)
    return lost <= CLOSE * abs(theirs.mean)


def _gain(summary: MethodSummary) -> float:
    """How much sooner a method is done: by time to the loss if it was reached."""
    gain = summary.to_target.speedup if summary.to_target else summary.step_speedup
    return gain or 0.0


def _won(document: Document, best: MethodResult, mine: MethodSummary, theirs: MethodSummary) -> str:
    where, plain = _where(document), _plain(document)
    fewer = f" with {show_number(mine.fewer_bytes)}x fewer bytes" if mine.fewer_bytes else ""
    if mine.to_target and theirs.to_target:
        text = (
            f"{best.name} reached {plain}'s final loss {show_ratio(mine.to_target.speedup)} "
            f"sooner on {where} ({show_seconds(mine.to_target.seconds)} instead of "
            f"{show_seconds(theirs.to_target.seconds)}){fewer}"
        )
    else:
        text = (
            f"{best.name} was {show_ratio(mine.step_speedup)} faster per step than {plain} on "
            f"{where}{fewer}"
        )
    if mine.final_metric is None or theirs.final_metric is None:
        return f"{text}."
    name, _, unit = (document.settings.metric or "metric").partition(", ")
    unit = f" {unit}" if unit else ""
    ended = f"{mine.final_metric.mean:.4g}{unit} ({plain} {theirs.final_metric.mean:.4g})"
    return f"{text}, and ended at a {name} of {ended}."


def _ends(document: Document, best: MethodResult) -> list[str]:
    """Where it stops paying, if that was looked at."""
    gains = {}
    for entry in document.sweep:
        theirs = entry.step_seconds.get(document.baseline or "")
        ours = entry.step_seconds.get(best.name)
        if theirs and ours:
            gains[entry.link] = theirs / ours
    if len(gains) < 2:
        return []
    told = in_words(f"{show_ratio(gain)} at {link}" for link, gain in gains.items())
    lost = [link for link, gain in gains.items() if gain < _WORTH]
    end = f" It no longer pays from {lost[0]} on." if lost else ""
    return [f"A step was faster by {told}.{end}"]


def _plain(document: Document) -> str:
    """The baseline, as people call it."""
    return f"plain {PARALLELISMS[document.settings.parallel].title}"


def _where(document: Document) -> str:
    settings = document.settings
    text = f"{settings.hosts} hosts with links of {in_words(dict.fromkeys(settings.links))}"
    text += distance_in_words(settings.delay, settings.jitter, settings.loss)
    if settings.inter:
        text += f" in {settings.racks} racks joined by {settings.inter}"
    return f"{text} (projected)" if document.projected else text
