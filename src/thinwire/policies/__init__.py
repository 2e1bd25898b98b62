"""Policies: which compressor a tensor is sent with at a step.

A policy of your own derives from `Policy` and makes a `Chooser` of its own, from the `TensorInfo`
of all tensors and what else a `PolicyContext` holds.
"""

from thinwire.policies.accuracy import Accuracy
from thinwire.policies.bandwidth import Auto, Bandwidth
from thinwire.policies.base import (
    ByName,
    Choice,
    Chooser,
    Decision,
    Fixed,
    Journal,
    Measured,
    OptimizerKind,
    Policy,
    PolicyContext,
    TensorInfo,
    policy_of,
)
from thinwire.policies.layerwise import Layerwise, Rule
from thinwire.policies.magnitude import Magnitude
from thinwire.policies.registry import list_policies, parse
from thinwire.policies.schedule import Progressive, Ramp, Warmup
from thinwire.policies.solve import Solve

__all__ = [
    "Accuracy",
    "Auto",
    "Bandwidth",
    "ByName",
    "Choice",
    "Chooser",
    "Decision",
    "Fixed",
    "Journal",
    "Layerwise",
    "Magnitude",
    "Measured",
    "OptimizerKind",
    "Policy",
    "PolicyContext",
    "Progressive",
    "Ramp",
    "Rule",
    "Solve",
    "TensorInfo",
    "Warmup",
    "list_policies",
    "parse",
    "policy_of",
]
