"""Tensors by their names, kinds and sizes."""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from thinwire.compressors import Compressor, NoCompression, Quantize, TopK
from thinwire.policies.base import Chooser, Policy, Setting, Shared, Target
from thinwire.policies.check import child
from thinwire.policies.fixed import ByName, Fixed

KINDS = ("embedding", "linear", "conv", "norm", "other", "last")


@dataclass(frozen=True)
class Rule:
    """What to do with some tensors.

    Args:
        then: a compressor, a policy, the spec of one, or "dense" for what travels as it is.
        match: pattern of names, as in a shell.
        kind: "embedding", "linear", "conv", "norm", "other", or "last" for the last layer.
        least, most: numbers of elements.
    """

    then: Policy | None
    match: str = "*"
    kind: str | None = None
    least: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        given: Any = self.then
        dense = given is None or (isinstance(given, str) and given.strip().lower() == "dense")
        object.__setattr__(self, "then", None if dense else child("Layerwise", given))
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(
                f"Layerwise: kind must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )

    def suits(self, tensor: Target) -> bool:
        kind = (
            self.kind is None or tensor.kind == self.kind or (self.kind == "last" and tensor.last)
        )
        size = self.least <= tensor.numel and (self.most is None or tensor.numel <= self.most)
        return kind and size and fnmatchcase(tensor.name, self.match)

    def table(self) -> dict[str, Any]:
        """As it stands in a file."""
        found: dict[str, Any] = {"match": self.match} if self.match != "*" else {}
        found |= {"kind": self.kind} if self.kind else {}
        found |= {"least": self.least} if self.least else {}
        found |= {"most": self.most} if self.most is not None else {}
        return {**found, "then": "dense" if self.then is None else str(self.then)}


# Rows of an embedding and of the last layer are mostly unused in a step: few elements say it all.
DEFAULT = (
    Rule(None, most=4096),
    Rule(Fixed(TopK(0.003) | Quantize(4)), kind="embedding"),
    Rule(Fixed(TopK(0.003) | Quantize(4)), kind="last"),
    Rule(Fixed(TopK(0.03) | Quantize(4))),
)


@dataclass(frozen=True)
class Layerwise(Policy):
    """Each tensor by its name, kind or size: the first rule that suits it.

    Args:
        rules: `Rule` objects, pairs (pattern, compressor), or a mapping of them; or text as in a
            spec, "embed*=topk:0.001; *=quantize:4"; or the path of a TOML or JSON file that `save`
            has written. Tensors that no rule suits travel as they are. By default: embeddings and
            the last layer strongly, small tensors not at all.

    Example:
        >>> import thinwire as tw
        >>> policy = tw.policies.Layerwise({"embed*": "topk:0.001", "*.weight": "quantize:4"})
        >>> str(policy)
        'layerwise:(embed*=topk:0.001; *.weight=quantize:4)'
    """

    rules: tuple[Rule, ...] = field(default=DEFAULT)
    name: ClassVar[str] = "layerwise"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _rules(self.rules))

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        found = [c for rule in self.rules if rule.then is not None for c in rule.then.compressors]
        return tuple(dict.fromkeys(found)) or (NoCompression(),)

    @property
    def main(self) -> Compressor:
        lossy = [c for c in self.compressors if not c.lossless]
        return lossy[0] if lossy else self.compressors[0]

    def begin(self, setting: Setting) -> Chooser:
        by_rule: dict[int, list[Target]] = {}
        dense = []
        for tensor in setting.tensors:
            for i, rule in enumerate(self.rules):
                if rule.suits(tensor):
                    by_rule.setdefault(i, []).append(tensor)
                    break
            else:
                dense.append(tensor.name)
        of: dict[str, Chooser] = {}
        for i, tensors in by_rule.items():
            policy = self.rules[i].then
            if policy is None:
                dense += [tensor.name for tensor in tensors]
                continue
            chooser = policy.begin(setting._replace(tensors=tensors))
            of.update({tensor.name: chooser for tensor in tensors})
        plain = ByName(tuple((name, None) for name in dense)).begin(setting)
        of.update(dict.fromkeys(dense, plain))
        return _Told(of, self, {name: str(self.rules[i].then) for i in by_rule
                                for name in [t.name for t in by_rule[i]]})  # fmt: skip

    @staticmethod
    def solve(
        uniform: Compressor | str = "topk:0.01",
        *,
        error_budget: float = 1.0,
        steps: int = 20,
        candidates: Sequence[Compressor | str] = (),
    ) -> "Policy":
        """A policy that profiles some steps, then gives each tensor the setting that makes the
        fewest bytes for a total error no worse than `error_budget` times that of `uniform`.

        See `thinwire.policies.Solve`.
        """
        from thinwire.policies.solve import Solve

        words = "; ".join(str(each) for each in candidates)
        return Solve(child("Layerwise.solve", uniform).main, error_budget, steps, words)

    def save(self, path: str | Path) -> None:
        """Write the rules to a file, TOML or JSON by its name."""
        path = Path(path)
        tables = [rule.table() for rule in self.rules]
        if path.suffix == ".json":
            path.write_text(json.dumps({"rule": tables}, indent=1) + "\n")
        elif path.suffix == ".toml":
            blocks = [
                "[[rule]]\n" + "".join(f"{key} = {json.dumps(v)}\n" for key, v in table.items())
                for table in tables
            ]
            path.write_text("# thinwire: what each tensor travels with\n\n" + "\n".join(blocks))
        else:
            raise ValueError(f"{path}: the name must end in .toml or .json")

    def __str__(self) -> str:
        if self.rules == DEFAULT:
            return self.name
        if any(rule.table().keys() - {"match", "then"} for rule in self.rules):
            return f"{self.name}:({len(self.rules)} rules)"
        words = "; ".join(f"{rule.match}={rule.table()['then']}" for rule in self.rules)
        return f"{self.name}:({words})"


class _Told(Shared):
    """That can say which tensors go which way."""

    def __init__(self, of: Mapping[str, Chooser], policy: Layerwise, words: dict[str, str]) -> None:
        super().__init__(of)
        self._words = {name: words.get(name, "None") for name in of}

    def explain(self) -> list[str]:
        return [*by_choice(self._words), *super().explain()]


def by_choice(words: Mapping[str, str]) -> list[str]:
    """A sentence on the tensors of each choice."""
    lines = []
    for choice in dict.fromkeys(words.values()):
        names = [name for name, word in words.items() if word == choice]
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        way = "as they are" if choice == "None" else f"with {choice}"
        lines.append(f"{some}: {way}.")
    return lines


def _rules(given: Any) -> tuple[Rule, ...]:
    if isinstance(given, str) and "=" in given:
        parts = [part.partition("=") for part in given.split(";") if part.strip()]
        pairs: Any = [(then.strip(), match.strip()) for match, _, then in parts]
        return tuple(Rule(then, match) for then, match in pairs)
    if isinstance(given, str | Path):
        return _read(Path(given))
    if isinstance(given, Mapping):
        given = given.items()
    if not isinstance(given, Iterable):
        raise TypeError(f"Layerwise: rules are rules, a mapping or a path, got {given!r}")
    found = tuple(rule if isinstance(rule, Rule) else Rule(rule[1], rule[0]) for rule in given)
    if not found:
        raise ValueError("Layerwise: no rules")
    return found


def _read(path: Path) -> tuple[Rule, ...]:
    """The rules of a file."""
    try:
        text = path.read_text()
        tables = (json.loads if path.suffix == ".json" else tomllib.loads)(text)["rule"]
        return tuple(Rule(**table) for table in tables)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"Layerwise: cannot read rules from {str(path)!r}: {error}") from None
