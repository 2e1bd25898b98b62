"""All policies by name. A new one is one line in `_ALL`."""

from typing import Any

from thinwire.compressors import Compressor, parse
from thinwire.policies.accuracy import Accuracy
from thinwire.policies.auto import Auto
from thinwire.policies.bandwidth import Bandwidth
from thinwire.policies.base import Policy
from thinwire.policies.fixed import Fixed
from thinwire.policies.layerwise import Layerwise
from thinwire.policies.magnitude import Magnitude
from thinwire.policies.schedule import Progressive, Ramp, Warmup
from thinwire.policies.solve import Solve
from thinwire.spec import build, read_value, usage

_ALL: tuple[type[Policy], ...] = (
    *(Warmup, Ramp, Progressive, Layerwise, Solve, Magnitude, Bandwidth, Accuracy, Auto),
)
BY_NAME: dict[str, type[Policy]] = {kind.name: kind for kind in _ALL}


def list_policies() -> dict[str, str]:
    """Every policy's name in spec strings, with one line on what it does."""
    return {name: (kind.__doc__ or "").partition("\n")[0] for name, kind in BY_NAME.items()}


def usages() -> list[tuple[str, str]]:
    """Every policy's spec with its arguments, and a line on it; for `thinwire policies`."""
    rules = {"layerwise": "layerwise:(PATTERN=SPEC; ...)"}
    lines = list_policies()
    return [(rules.get(kind.name) or usage(kind), lines[kind.name]) for kind in _ALL]


def is_policy(spec: str) -> bool:
    """Whether a spec names a policy."""
    return spec.partition(":")[0].strip().lower() in BY_NAME


def parse_policy(spec: str) -> Policy:
    """The policy that a spec string names, such as ``warmup:500,(topk:0.01)``.

    ``str(policy)`` is the inverse. Raises ValueError that says what is wrong and what is known.
    """
    if not isinstance(spec, str):
        raise TypeError(f"a spec is a string such as 'auto', got {spec!r}")
    return build(spec, "policy", BY_NAME, _value)


def policy_of(given: Policy | Compressor | str) -> Policy:
    """A policy, from itself, a compressor, or the spec of either."""
    if isinstance(given, Policy):
        return given
    if isinstance(given, Compressor):
        return Fixed(given)
    if not isinstance(given, str):
        kind = type(given).__name__
        raise TypeError(
            f"expected a policy, a compressor or a spec such as 'topk:0.01', got {kind}"
        )
    return parse_policy(given) if is_policy(given) else Fixed(parse(given))


def _value(text: str) -> Any:
    """What stands in parentheses is a spec; who asked for it knows of what."""
    if text.startswith("(") and text.endswith(")"):
        return text[1:-1]
    return read_value(text)
