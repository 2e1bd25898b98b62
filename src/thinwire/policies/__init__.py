"""Policies: which compressor a tensor travels with at a step."""

from thinwire.policies.accuracy import Accuracy
from thinwire.policies.auto import Auto
from thinwire.policies.bandwidth import Bandwidth
from thinwire.policies.base import Policy
from thinwire.policies.layerwise import Layerwise, Rule
from thinwire.policies.magnitude import Magnitude
from thinwire.policies.registry import list_policies, parse_policy
from thinwire.policies.schedule import Progressive, Ramp, Warmup
from thinwire.policies.solve import Solve

__all__ = [
    "Accuracy",
    "Auto",
    "Bandwidth",
    "Layerwise",
    "Magnitude",
    "Policy",
    "Progressive",
    "Ramp",
    "Rule",
    "Solve",
    "Warmup",
    "list_policies",
    "parse_policy",
]
