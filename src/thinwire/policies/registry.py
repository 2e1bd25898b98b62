"""All policies by name. A new one is one more name in `POLICIES.add`."""

from thinwire.policies.accuracy import Accuracy
from thinwire.policies.bandwidth import Auto, Bandwidth
from thinwire.policies.base import POLICIES, Policy
from thinwire.policies.layerwise import Layerwise
from thinwire.policies.magnitude import Magnitude
from thinwire.policies.schedule import Progressive, Ramp, Warmup
from thinwire.policies.solve import Solve
from thinwire.spec import usage

POLICIES.add(Warmup, Ramp, Progressive, Layerwise, Solve, Magnitude, Bandwidth, Accuracy, Auto)
_RULES = "layerwise:(PATTERN=SPEC; (kind=KIND,least=N,most=N)=SPEC; ...)"


def list_policies() -> dict[str, str]:
    """Every policy's name in spec strings, with one line on what it does."""
    return POLICIES.lines()


def usages() -> list[tuple[str, str]]:
    """Every policy's spec with its arguments, and a line on it; for `thinwire policies`."""
    found = {name: usage(kind) for name, kind in POLICIES.classes.items()}
    return [
        ({**found, Layerwise.name: _RULES}[name], line) for name, line in list_policies().items()
    ]


def parse(spec: str) -> Policy:
    """The policy that a spec string names, such as ``warmup:500,(topk:0.01)``.

    The spec of a compressor is that of a policy which always chooses it. ``str(policy)`` is the
    inverse. Raises ValueError that says what is wrong and what is known.
    """
    return POLICIES.parse(spec)
