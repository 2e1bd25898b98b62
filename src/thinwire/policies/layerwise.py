"""Tensors by their names, kinds and sizes."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire import check
from thinwire.compressors import Compressor, NoCompression, Quantize, TopK
from thinwire.policies.base import (
    POLICIES,
    ByName,
    Chooser,
    Fixed,
    Policy,
    PolicyContext,
    Shared,
    TensorInfo,
    how,
    inner_policy,
)
from thinwire.spec import (
    Kind,
    arguments_of,
    enclosed,
    quoted,
    read_list,
    read_rest,
    split,
    unquoted,
    word,
)

KINDS = ("embedding", "linear", "conv", "norm", "other", "last")
DENSE = "dense"  # in place of a spec: uncompressed
Then = Policy | Compressor | str | None  # what a rule may be given; None and "dense": uncompressed


@dataclass(frozen=True)
class Rule:
    """What to do with some tensors.

    In a spec it is ``PATTERN=SPEC``, or ``(kind=embedding,most=4096)=SPEC`` with any of the
    arguments below. A pattern that holds one of ``"(),;=|`` or a space is quoted as in JSON.

    Args:
        then: a compressor, a policy, the spec of one, or "dense" for uncompressed.
        match: pattern of names, as in a shell.
        kind: "embedding", "linear", "conv", "norm", "other", or "last" for the last layer.
        least, most: numbers of elements.

    Example:
        >>> import thinwire as tw
        >>> str(tw.policies.Rule("topk:0.001", match="embed*", least=4096))
        '(match=embed*,least=4096)=topk:0.001'
    """

    then: Policy | None
    match: str = "*"
    kind: str | None = None
    least: int = 0
    most: int | None = None
    name: ClassVar[str] = "rule"

    if TYPE_CHECKING:

        def __init__(
            self,
            then: Then,
            match: str = "*",
            kind: str | None = None,
            least: int = 0,
            most: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        given: Any = self.then
        dense = given is None or (isinstance(given, str) and given.strip().lower() == DENSE)
        object.__setattr__(self, "then", None if dense else inner_policy("Layerwise", given))
        if not isinstance(self.match, str):
            raise TypeError(f"Layerwise: match must be a pattern of names, got {self.match!r}")
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(
                f"Layerwise: kind must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        check.whole("Layerwise", "least", self.least, 0)
        if self.most is not None:
            check.whole("Layerwise", "most", self.most, self.least)

    def suits(self, tensor: TensorInfo) -> bool:
        kind = (
            self.kind is None or tensor.kind == self.kind or (self.kind == "last" and tensor.last)
        )
        size = self.least <= tensor.numel and (self.most is None or tensor.numel <= self.most)
        return kind and size and fnmatchcase(tensor.name, self.match)

    @property
    def spec(self) -> str:
        """Of what is done."""
        return DENSE if self.then is None else str(self.then)

    def table(self) -> dict[str, Any]:
        """As it stands in a file."""
        found: dict[str, Any] = {"match": self.match} if self.match != "*" else {}
        found |= {"kind": self.kind} if self.kind else {}
        found |= {"least": self.least} if self.least else {}
        found |= {"most": self.most} if self.most is not None else {}
        return {**found, "then": self.spec}

    def __str__(self) -> str:
        _, *conditions = arguments_of(replace(self, then=None), named=True)  # all but `then`
        simple = self == Rule(self.then, self.match)
        selector = word(self.match) if simple else f"({','.join(conditions)})"
        return f"{selector}={self.spec}"


class _Rules(Kind[Rule]):
    def read(self, text: str) -> Rule:
        selector, *then = split(text, "=", 1)
        if not then or not then[0]:
            raise ValueError(f"{text!r}: a rule is PATTERN=SPEC or (kind=...,most=...)=SPEC")
        choice = None if then[0].lower() == DENSE else POLICIES.read(then[0])
        conditions = enclosed(selector)
        if conditions is None:
            return Rule(choice, unquoted(selector))
        return read_rest(Rule, conditions, then=choice)


RULES = _Rules("rule", "rules", Rule, "embed*=topk:0.01")
RULES.add(Rule)


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
            spec, "embed*=topk:0.001; (most=4096)=dense; *=quantize:4"; or the path of a TOML or
            JSON file that `save` has written. Tensors that no rule suits are uncompressed. By
            default: embeddings and the last layer strongly, small tensors not at all.

    Example:
        >>> import thinwire as tw
        >>> policy = tw.policies.Layerwise({"embed*": "topk:0.001", "*.weight": "quantize:4"})
        >>> str(policy)
        'layerwise:(embed*=topk:0.001; *.weight=quantize:4)'
    """

    rules: tuple[Rule, ...] = field(default=DEFAULT)
    name: ClassVar[str] = "layerwise"

    if TYPE_CHECKING:

        def __init__(
            self,
            rules: str | Path | Mapping[str, Then] | Iterable[Rule | tuple[str, Then]] = DEFAULT,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _rules(self.rules))

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        found = [c for rule in self.rules if rule.then is not None for c in rule.then.compressors]
        return tuple(dict.fromkeys(found)) or (NoCompression(),)

    @property
    def under_adam(self) -> tuple[Compressor, ...]:
        found = [c for rule in self.rules if rule.then is not None for c in rule.then.under_adam]
        return tuple(dict.fromkeys(found)) or (NoCompression(),)

    @property
    def main(self) -> Compressor:
        lossy = [c for c in self.compressors if not c.lossless]
        return lossy[0] if lossy else self.compressors[0]

    def begin(self, context: PolicyContext) -> Chooser:
        by_rule: dict[int, list[TensorInfo]] = {}
        dense = []
        for tensor in context.tensors:
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
            chooser = policy.begin(context._replace(tensors=tensors))
            of.update({tensor.name: chooser for tensor in tensors})
        plain = ByName(tuple((name, None) for name in dense)).begin(context)
        of.update(dict.fromkeys(dense, plain))
        words = {
            tensor.name: how(None) if then is None else f"with {then}"
            for then, tensors in ((self.rules[i].then, found) for i, found in by_rule.items())
            for tensor in tensors
        }
        return _Told(of, words)

    @staticmethod
    def solve(
        uniform: Compressor | str = "topk:0.01",
        *,
        error_budget: float = 1.0,
        steps: int = 20,
        candidates: str | Iterable[Compressor | str] = (),
    ) -> Policy:
        """A policy that profiles some steps, then gives each tensor the setting that makes the
        fewest bytes for a total error no worse than `error_budget` times that of `uniform`.

        See `thinwire.policies.Solve`.
        """
        from thinwire.policies.solve import Solve

        return Solve(uniform, error_budget, steps, candidates)

    def save(self, path: str | Path) -> None:
        """Write the rules to a file, TOML or JSON by its name."""
        path = Path(path)
        tables = [rule.table() for rule in self.rules]
        if path.suffix == ".json":
            path.write_text(json.dumps({"rule": tables}, indent=1) + "\n", encoding="utf-8")
        elif path.suffix == ".toml":
            blocks = [
                "[[rule]]\n" + "".join(f"{key} = {_toml(v)}\n" for key, v in table.items())
                for table in tables
            ]
            text = "# thinwire: how each tensor is sent\n\n" + "\n".join(blocks)
            path.write_text(text, encoding="utf-8")
        else:
            raise ValueError(f"{path}: the name must end in .toml or .json")


class _Told(Shared):
    """That can say which tensors go which way."""

    def __init__(self, of: Mapping[str, Chooser], words: dict[str, str]) -> None:
        super().__init__(of)
        self._words = {name: words.get(name, how(None)) for name in of}

    def explain(self) -> list[str]:
        return [*by_choice(self._words), *super().explain()]


def by_choice(words: Mapping[str, str]) -> list[str]:
    """A sentence on the tensors of each choice."""
    lines = []
    for choice in dict.fromkeys(words.values()):
        names = [name for name, word in words.items() if word == choice]
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(f"{some}: {choice}.")
    return lines


def _toml(value: Any) -> str:
    return quoted(value) if isinstance(value, str) else str(value)


def _rules(given: Any) -> tuple[Rule, ...]:
    if isinstance(given, str) and "=" in given:
        found = read_list(given, Rule)
    elif isinstance(given, str | Path):
        found = _read(Path(given))
    elif isinstance(given, Iterable) and not isinstance(given, type):
        pairs = given.items() if isinstance(given, Mapping) else given
        found = tuple(each if isinstance(each, Rule) else _pair(each) for each in pairs)
    else:
        raise TypeError(f"Layerwise: rules are rules, a mapping or a path, got {given!r}")
    if not found:
        raise ValueError("Layerwise: no rules")
    return found


def _pair(given: Any) -> Rule:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"Layerwise: a rule is a Rule or (pattern, compressor), got {given!r}")
    return Rule(given[1], given[0])


def _read(path: Path) -> tuple[Rule, ...]:
    """The rules of a file."""
    try:
        text = path.read_text(encoding="utf-8")
        tables = (json.loads if path.suffix == ".json" else tomllib.loads)(text)["rule"]
        return tuple(Rule(**table) for table in tables)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"Layerwise: cannot read rules from {str(path)!r}: {error}") from None
