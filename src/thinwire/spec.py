"""Spec strings, and the same as JSON: what a compressor, feedback, policy or method is made with.

    spec      = stage *( "|" stage )                    with "|", a chain of compressors
    stage     = name [ ":" argument *( "," argument ) ]
    argument  = [ field "=" ] value
    value     = number | bits | true | false | none | word | string | "(" spec ")" | "(" list ")"
    bits      = digits "bit"                            4bit
    string    = as in JSON                              "a;b", for words that hold a separator
    list      = [ item *( ";" item ) ]
    item      = spec | value "=" value | rule
    rule      = selector "=" ( spec | dense )           see thinwire.policies.Rule
    selector  = word | string | "(" argument *( "," argument ) ")"

Whatever is a frozen dataclass with a `name` can be written in this way. Arguments without a field
name fill the fields in order, keyword-only ones last. What parentheses enclose follows from the
annotation of the field. `spec_of` leaves out defaults and is the inverse of `Kind.parse`.

A `Kind` holds the classes that specs of one kind can name. Every kind registers itself here, so
that a field of one kind may hold another, and an unknown name is answered with all that is known.
Between processes objects are sent as JSON (`to_json`, `from_json`), which needs no quoting.
"""

import importlib
import json
import re
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from itertools import takewhile
from operator import eq
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, Union, get_args, get_origin

T = TypeVar("T")
MOST_NESTED = 50  # parentheses within parentheses

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"[-+]?\d+", re.ASCII)
_BITS = re.compile(r"(\d{1,3})\s*bit", re.ASCII | re.IGNORECASE)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_WORD = re.compile(r'[^\s"(),;=|]+')
_LITERALS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Bits:
    """A number of bits, as in "4bit": no int, so that it passes for one nowhere."""

    count: int

    def __repr__(self) -> str:
        return f"{self.count}bit"


class Arguments(NamedTuple):
    """A stage of a spec, its values still text."""

    text: str
    name: str
    positional: list[str]
    named: dict[str, str]


def load_kinds() -> None:
    """Have all kinds registered, which they are when their rooms are imported: what can be read,
    and what an error says, must not depend on what was imported before."""
    for room in ("compressors", "feedback", "policies", "methods"):
        importlib.import_module(f"thinwire.{room}")


class Kind(Generic[T]):
    """The classes that specs of one kind can name.

    Args:
        noun, plural: what such objects are called in messages; the noun is their kind in JSON.
        base: of the classes. A field annotated with it holds objects of this kind.
        example: a spec, for messages.
        beside: another kind that users may mean when they give a name of this one.
    """

    every: ClassVar[dict[str, "Kind[Any]"]] = {}

    def __init__(
        self,
        noun: str,
        plural: str,
        base: type[Any],
        example: str,
        beside: "Kind[Any] | None" = None,
    ) -> None:
        self.noun, self.plural, self.base, self.example = noun, plural, base, example
        self.classes: dict[str, type[T]] = {}  # that a spec can name
        self.unnamed: dict[str, type[T]] = {}  # that only JSON names
        self.family: list[Kind[Any]] = [] if beside is None else beside.family
        self.family.append(self)
        Kind.every[noun] = self

    def add(self, *classes: type[T]) -> None:
        """Let specs name these classes."""
        self.classes |= {each.name: each for each in classes}  # type: ignore[attr-defined]

    def parse(self, spec: object) -> T:
        """The object that a spec describes.

        Raises:
            TypeError: it is no string.
            ValueError: says what is wrong, and what is known.
        """
        if isinstance(spec, type):
            raise TypeError(f"{spec.__name__} is a class, give an object: {spec.__name__}(...)")
        if not isinstance(spec, str):
            raise TypeError(f"a spec is a string such as {self.example!r}, got {spec!r}")
        return self.read(spec)

    def read(self, text: str) -> T:
        """The object that some text describes: one stage, unless a kind has more to it."""
        if len(split(text, "|")) > 1 and self.knows(text):
            raise ValueError(
                f"{text!r}: '|' chains compressors, and {name_of(text)} is a {self.noun}"
            )
        stage = read_stage(text)
        if stage.name not in self.classes:
            raise self.unknown(stage.name)
        return build(self.classes[stage.name], stage)

    def knows(self, spec: str) -> bool:
        """Whether a spec begins with a name of this kind."""
        return name_of(spec) in self.classes

    def unknown(self, name: str, noun: str = "") -> ValueError:
        """The error for a name that is none of this kind."""
        load_kinds()
        others = [kind for kind in self.family if kind is not self]
        # Those that may stand in its place first: dgc is a method and a feedback.
        kinds = [*others, *Kind.every.values()]
        found = next((kind.noun for kind in kinds if name in kind.classes), None)
        names = [*self.classes, *(each for kind in others for each in kind.classes)]
        close = get_close_matches(name, names, 3)
        # Of names that are equally close, the one that begins alike.
        close.sort(key=lambda each: -sum(takewhile(bool, map(eq, name, each))))
        hint = f": did you mean {close[0]!r}? " if close else "; "
        hint = f": that is a {found}; " if found else hint
        known = [f"{kind.plural}: {', '.join(sorted(kind.classes))}" for kind in (self, *others)]
        return ValueError(f"unknown {noun or self.noun} {name!r}{hint}{'; '.join(known)}")

    def lines(self) -> dict[str, str]:
        """Every name, with one line on what it stands for."""
        return {name: first_line(each) for name, each in self.classes.items()}


def first_line(described: Any) -> str:
    """Of a docstring."""
    return (described.__doc__ or "").partition("\n")[0]


def ordered(kind: Any) -> list[Field[Any]]:
    """The fields in the order that arguments without a name fill them."""
    return sorted(fields(kind), key=lambda field: field.kw_only is True)


def default_of(field: Field[Any]) -> Any:
    """A field's default, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


# Writing


def spec_of(described: Any) -> str:
    """The spec string of one stage; defaults are left out."""
    arguments = ",".join(arguments_of(described))
    name: str = described.name
    return f"{name}:{arguments}" if arguments else name


def arguments_of(described: Any, named: bool = False) -> list[str]:
    """The arguments that differ from defaults, all by name or as many as possible without;
    keyword-only ones always with."""
    found = []
    for field in ordered(described):
        value = getattr(described, field.name)
        if value == default_of(field):
            named = True
            continue
        by_name = named or field.kw_only
        found.append(f"{field.name}={_written(value)}" if by_name else _written(value))
    return found


def word(text: str) -> str:
    """Text as a word of a spec, in quotes where it would be read as something else."""
    plain = _WORD.fullmatch(text) and isinstance(_literal(text), str)
    return text if plain else quoted(text)


def quoted(text: str) -> str:
    """A string as in JSON, and TOML."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return word(value)
    return f"({'; '.join(map(_item, value))})" if isinstance(value, tuple) else f"({value})"


def _item(value: Any) -> str:
    if isinstance(value, tuple):
        return "=".join(map(_written, value))
    return str(value) if is_dataclass(value) else _written(value)


def usage(kind: Any) -> str:
    """The spec of a class with all its arguments and their defaults."""
    words = []
    for field in ordered(kind):
        default = default_of(field)
        name = field.name
        words.append(name.upper() if default is MISSING else f"{name}={_written(default)}")
    whole: str = kind.name
    return whole + (":" + ",".join(words) if words else "")


# Reading


def name_of(spec: str) -> str:
    """The name that a spec begins with."""
    return spec.partition(":")[0].partition("|")[0].strip().lower()


def split(text: str, separator: str, most: int = -1) -> list[str]:
    """Split at a separator that stands outside all parentheses and strings, `most` times."""
    parts: list[str] = []
    begin = 0
    for i, char, depth in _outside(text):
        if char == separator and depth == 0 and len(parts) != most:
            parts.append(text[begin:i])
            begin = i + 1
    return [part.strip() for part in [*parts, text[begin:]]]


def enclosed(text: str) -> str | None:
    """What stands in a pair of parentheses around the whole of a text; None if there is none."""
    ends = [i for i, char, depth in _outside(text) if char == ")" and depth == 0]
    whole = text.startswith("(") and ends[:1] == [len(text) - 1]
    return text[1:-1].strip() if whole else None


def _outside(text: str) -> Iterator[tuple[int, str, int]]:
    """What stands outside strings: the place, the character, and how many parentheses are open
    around it."""
    i = depth = 0
    while i < len(text):
        char = text[i]
        if char == '"':
            i = _end_of_string(text, i)
            continue
        depth -= char == ")"
        if depth < 0:
            break
        yield i, char, depth
        depth += char == "("
        if depth > MOST_NESTED:
            raise ValueError(f"{_short(text)}: more than {MOST_NESTED} parentheses are open")
        i += 1
    if depth:
        raise ValueError(f"{text!r}: parentheses do not match")


def _end_of_string(text: str, begin: int) -> int:
    found = _STRING.match(text, begin)
    if found is None:
        raise ValueError(f"{text!r}: a quote is not closed")
    return found.end()


def read_stage(text: str) -> Arguments:
    """The name and the arguments of a stage."""
    name, _, rest = text.partition(":")
    return Arguments(text, name.strip().lower(), *_read_arguments(rest, text))


def _read_arguments(rest: str, whole: str) -> tuple[list[str], dict[str, str]]:
    positional: list[str] = []
    named: dict[str, str] = {}
    for argument in split(rest, ",") if rest.strip() else []:
        field, *value = split(argument, "=", 1)
        if not value or not field.isidentifier():
            if named:
                raise ValueError(f"{whole!r}: {argument!r} must come before named arguments")
            positional.append(argument)
        elif field in named:
            raise ValueError(f"{whole!r} has an argument twice: {field}")
        else:
            named[field] = value[0]
    return positional, named


def build(kind: type[T], stage: Arguments) -> T:
    """An object of a class from the arguments of a stage."""
    known = {field.name: field for field in ordered(kind)}
    positional, named = stage.positional, stage.named
    if len(positional) > len(known):
        raise ValueError(f"{stage.text!r} has too many arguments; usage: {usage(kind)}")
    values = {**dict(zip(known, positional, strict=False)), **named}
    unknown = [field for field in values if field not in known]
    missing = [f for f in known if f not in values and default_of(known[f]) is MISSING]
    what = ""
    if unknown:
        what = f"has no argument {unknown[0]!r}"
    elif len(values) < len(positional) + len(named):
        what = "has an argument twice"
    elif missing:
        what = f"lacks an argument, {missing[0]}"
    if what:
        raise ValueError(f"{stage.text!r} {what}; usage: {usage(kind)}")
    try:
        read = {field: read_value(value, known[field].type) for field, value in values.items()}
    except ValueError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None
    return make(kind, read)


def make(kind: type[T], values: dict[str, Any]) -> T:
    """An object of a class; what its checks refuse is a ValueError."""
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error)) from None


def read_rest(kind: type[T], text: str, **values: Any) -> T:
    """An object from named arguments without a name before them, and values read already."""
    _, named = stage = _read_arguments(text, text)
    known = {field.name: field for field in ordered(kind)}
    wrong = [*stage[0], *(field for field in named if field not in known or field in values)]
    if wrong:
        free = ", ".join(f"{field}=" for field in known if field not in values)
        raise ValueError(f"{text!r}: {wrong[0]!r} is none of {free}")
    read = {field: read_value(value, known[field].type) for field, value in named.items()}
    return make(kind, {**read, **values})


def read_value(text: str, hint: Any) -> Any:
    """A value for a field with this annotation."""
    kind, item = _kind_in(hint), _item_in(hint)
    if text.startswith('"'):
        return unquoted(text)
    inner = enclosed(text)
    if inner is not None:
        if item is not None:
            return read_list(inner, item)
        if kind is not None:
            return kind.read(inner)
        raise ValueError(f"{text}: parentheses enclose objects and lists, and here stands a value")
    value = _literal(text)
    return kind.read(text) if kind is not None and isinstance(value, str) else value


def read_list(text: str, hint: Any) -> tuple[Any, ...]:
    """Items with this annotation, separated by ";"."""
    return tuple(_read_item(part, hint) for part in split(text, ";") if part)


def _read_item(text: str, hint: Any) -> Any:
    kind = _kind_in(hint)
    if kind is not None:
        inner = enclosed(text)
        return kind.read(text if inner is None else inner)
    if get_origin(hint) is not tuple:
        return read_value(text, hint)
    hints, values = get_args(hint), split(text, "=", 1)
    if len(values) != len(hints):
        raise ValueError(f"{text!r}: a pair is written with '=' between its values")
    return tuple(read_value(value, each) for value, each in zip(values, hints, strict=True))


def unquoted(text: str) -> str:
    """The text of a quoted string; a word stays as it is."""
    if not text.startswith('"'):
        return text
    if _end_of_string(text, 0) != len(text):
        raise ValueError(f"{text}: something follows the closing quote")
    try:
        found: str = json.loads(text, strict=False)
    except ValueError as error:
        raise ValueError(f"{text}: not a string as in JSON: {error}") from None
    return found


def _literal(text: str) -> Any:
    """A number, bits, true, false or none; anything else is a word."""
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    if _NUMBER.fullmatch(text):
        return int(text) if _WHOLE.fullmatch(text) else float(text)
    found = _BITS.fullmatch(text)
    return Bits(int(found[1])) if found else text


def _options(hint: Any) -> tuple[Any, ...]:
    """The types that an annotation allows."""
    return get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)


def _kind_in(hint: Any) -> Kind[Any] | None:
    plain = [option for option in _options(hint) if isinstance(option, type)]
    found = (k for k in Kind.every.values() if any(issubclass(each, k.base) for each in plain))
    return next(found, None)


def _item_in(hint: Any) -> Any:
    """The annotation of what a tuple of any length holds; None if there is no such tuple."""
    for option in _options(hint):
        if get_origin(option) is tuple and get_args(option)[1:] == (...,):
            return get_args(option)[0]
    return None


# JSON


def to_json(described: Any) -> dict[str, Any]:
    """An object as `json.dumps` takes it: its kind, its name, the fields that are no defaults.

    >>> from thinwire.compressors import TopK
    >>> to_json(TopK(0.01))
    {'kind': 'compressor', 'name': 'topk', 'fields': {'ratio': 0.01}}
    """
    kind = next((k for k in Kind.every.values() if isinstance(described, k.base)), None)
    name = getattr(described, "name", "")
    known = {} if kind is None else {**kind.classes, **kind.unnamed}
    if kind is None or not isinstance(described, known.get(name, ())):
        raise ValueError(f"{described!r} has no spec, so it cannot be written as JSON")
    found = {field.name: getattr(described, field.name) for field in ordered(described)}
    defaults = {field.name: default_of(field) for field in ordered(described)}
    changed = {field: _plain(value) for field, value in found.items() if value != defaults[field]}
    return {"kind": kind.noun, "name": name, "fields": changed}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return to_json(value) if is_dataclass(value) else value


def from_json(data: Any) -> Any:
    """The object that `to_json` has written, with all its settings checked again.

    Nothing but registered classes can come of it, whatever the data.

    >>> from_json({"kind": "compressor", "name": "topk", "fields": {"ratio": 0.01}})
    TopK(ratio=0.01, chunk=None)
    """
    load_kinds()
    return _object(data, 0)


def _object(data: Any, depth: int) -> Any:
    if depth > MOST_NESTED:
        raise ValueError(f"objects within objects, more than {MOST_NESTED}")
    if not isinstance(data, dict) or data.keys() != {"kind", "name", "fields"}:
        raise ValueError(f"expected an object with kind, name and fields, got {_short(data)}")
    noun, name, values = data["kind"], data["name"], data["fields"]
    kind = Kind.every.get(noun) if isinstance(noun, str) else None
    if kind is None:
        known = ", ".join(sorted(Kind.every))
        raise ValueError(f"unknown kind {_short(noun)}, known: {known}")
    found = {**kind.classes, **kind.unnamed}.get(name) if isinstance(name, str) else None
    if found is None:
        raise kind.unknown(str(name))
    allowed = {field.name: field for field in ordered(found)}
    if not isinstance(values, dict) or not values.keys() <= allowed.keys():
        raise ValueError(f"{noun} {name} has the fields {', '.join(allowed)}, got {_short(values)}")
    missing = [f for f in allowed if f not in values and default_of(allowed[f]) is MISSING]
    if missing:
        raise ValueError(f"{noun} {name} lacks {missing[0]}")
    try:
        read = {key: _value(each, allowed[key].type, depth + 1) for key, each in values.items()}
    except ValueError as error:
        raise ValueError(f"{found.__name__}: {error}") from None
    return make(found, read)


def _value(data: Any, hint: Any, depth: int) -> Any:
    """Specs and paths in place of objects are refused: a reader must not open files."""
    item, options = _item_in(hint), _options(hint)
    if isinstance(data, dict):
        found = _object(data, depth)
        if not any(isinstance(o, type) and isinstance(found, o) for o in options):
            raise ValueError(f"{found!r} is not what this field holds")
        return found
    if isinstance(data, list) and item is not None:
        return tuple(_value(each, item, depth) for each in data)
    if isinstance(data, list) and get_origin(hint) is tuple:
        if len(data) != len(get_args(hint)):
            raise ValueError(f"expected {len(get_args(hint))} values, got {_short(data)}")
        return tuple(_value(d, h, depth) for d, h in zip(data, get_args(hint), strict=True))
    if isinstance(data, list) or (isinstance(data, str) and str not in options):
        raise ValueError(f"{_short(data)} is not what this field holds")
    if data is None and type(None) not in options:
        raise ValueError("null is not what this field holds")
    return data


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 80 else f"{text[:77]}..."
