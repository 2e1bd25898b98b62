"""Spec strings: a compressor in a line, such as ``topk:0.01|quantize:4,stochastic=true``.

    chain      = stage *( "|" stage )
    stage      = name [ ":" argument *( "," argument ) ]
    argument   = value | field "=" value
    value      = number | true | false | none | word | "(" chain ")"

Arguments without a field name fill the fields in order, keyword-only ones last. `spec_of` leaves
out defaults and is the inverse of `build`. The grammar serves whatever is a frozen dataclass with a
`name`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def ordered(kind: Any) -> list[Field[Any]]:
    """The fields in the order that arguments without a name fill them."""
    return sorted(fields(kind), key=lambda field: field.kw_only is True)


def default_of(field: Field[Any]) -> Any:
    """A field's default, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def spec_of(described: Any) -> str:
    """The spec string of one stage; defaults are left out."""
    arguments, named = [], False
    for field in ordered(described):
        value = getattr(described, field.name)
        if value == default_of(field):
            named = True
            continue
        arguments.append(f"{field.name}={_write(value)}" if named else _write(value))
    name: str = described.name
    return name + (":" + ",".join(arguments) if arguments else "")


def _write(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    return value if isinstance(value, str) else f"({value})"


def split(text: str, separator: str) -> list[str]:
    """Split at a separator that stands outside all parentheses."""
    parts, depth, begin = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if char == separator and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    if depth:
        raise ValueError(f"{text!r}: parentheses do not match")
    return [part.strip() for part in [*parts, text[begin:]]]


def read_value(text: str) -> Any:
    """A literal of the grammar above, apart from the parentheses."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    return text


def read_stage(stage: str) -> tuple[str, list[str], dict[str, str]]:
    """(name, positional arguments, named arguments), all still text."""
    name, _, rest = stage.partition(":")
    positional: list[str] = []
    named: dict[str, str] = {}
    for argument in split(rest, ",") if rest.strip() else []:
        field, equals, value = argument.partition("=")
        if equals and field.strip().isidentifier():
            named[field.strip()] = value.strip()
        elif named:
            raise ValueError(f"{stage!r}: {argument!r} must come before named arguments")
        else:
            positional.append(argument)
    return name.strip().lower(), positional, named


def usage(kind: Any) -> str:
    """The spec of a kind with all its arguments and their defaults."""
    words = []
    for field in ordered(kind):
        default = default_of(field)
        if default is MISSING:
            words.append(field.name.upper())
        elif is_dataclass(default):
            words.append(f"{field.name}=({default})")
        else:
            shown = str(default).lower() if default is None or default is True else default
            words.append(f"{field.name}={'false' if default is False else shown}")
    name: str = kind.name
    return name + (":" + ",".join(words) if words else "")


def build(
    text: str, noun: str, kinds: Mapping[str, type[T]], read: Callable[[str], Any] = read_value
) -> T:
    """The object that one stage describes, of one of the named kinds."""
    name, positional, named = read_stage(text)
    if name not in kinds:
        raise ValueError(f"unknown {noun} {name!r}, known: {', '.join(sorted(kinds))}")
    kind: Any = kinds[name]
    names = [field.name for field in ordered(kind)]
    if len(positional) > len(names):
        raise ValueError(f"{text!r} has too many arguments; usage: {usage(kind)}")
    values = {**dict(zip(names, positional, strict=False)), **named}
    unknown = [field for field in values if field not in names]
    if unknown or len(values) < len(positional) + len(named):
        what = f"no argument {unknown[0]!r}" if unknown else "an argument twice"
        raise ValueError(f"{text!r} has {what}; usage: {usage(kind)}")
    try:
        built: T = kind(**{field: read(value) for field, value in values.items()})
    except TypeError:
        raise ValueError(f"{text!r} lacks an argument; usage: {usage(kind)}") from None
    return built
