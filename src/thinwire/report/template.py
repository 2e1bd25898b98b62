"""Pages from templates: what is put into one is escaped, and a name it does not know is an error.

`environment("thinwire.bench")` finds the templates in `templates/` of that package, and those of
`thinwire.report` besides: `{% extends "page.html.j2" %}` makes a page in the style of all, with the
blocks `style` and `body`. Only what is known to be HTML, as an inline picture is, goes in as
`markupsafe.Markup`.
"""

from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from thinwire.formatting import (
    in_words,
    plural,
    show_bytes,
    show_count,
    show_number,
    show_rate,
    show_ratio,
    show_seconds,
)

_SHARED = "thinwire.report"
_FILTERS = {
    "bytes": show_bytes,
    "count": show_count,
    "in_words": in_words,
    "number": show_number,
    "plural": plural,
    "rate": show_rate,
    "ratio": show_ratio,
    "seconds": show_seconds,
}


@cache
def environment(package: str = _SHARED) -> Environment:
    """The templates of a package, with filters for bytes, counts, numbers, rates and ratios."""
    packages = dict.fromkeys((package, _SHARED))
    found = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters.update(_FILTERS)
    return found
