"""Spec strings: a compressor in a line, such as ``topk:0.01|quantize:4,stochastic=true``.

    chain      = stage *( "|" stage )
    stage      = name [ ":" argument *( "," argument ) ]
    argument   = value | field "=" value
    value      = number | true | false | none | word | "(" chain ")"

Arguments without a field name fill the fields in order. `spec_of` leaves out defaults and is the
inverse of `parse`, which lives with the registry.
"""

import re
from dataclasses import MISSING, Field, fields
from typing import Any

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def default_of(field: Field[Any]) -> Any:
    """A field's default, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def spec_of(compressor: Any) -> str:
    """The spec string of one stage; defaults are left out."""
    arguments, named = [], False
    for field in fields(compressor):
        value = getattr(compressor, field.name)
        if value == default_of(field):
            named = True
            continue
        arguments.append(f"{field.name}={_write(value)}" if named else _write(value))
    name: str = compressor.name
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
