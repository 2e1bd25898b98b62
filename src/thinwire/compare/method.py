"""The methods that can be compared, by name.

ddp                    DistributedDataParallel as it is
torch:fp16, :bf16      PyTorch's own hooks
torch:powersgd[:RANK]
COMPRESSOR[+FEEDBACK]  thinwire, as in "topk:0.01|quantize:4+ef14"; without a feedback "auto"
POLICY[+FEEDBACK]      thinwire, as in "auto" or "warmup:50,(topk:0.01)+ef14"
onebit-adam, onebit-lamb, zero-one-adam
                       optimizers of thinwire that exchange by themselves
script                 a user's script just as it is written
"""

import re
from dataclasses import dataclass

from thinwire.compare.settings import SettingError

_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"
_ARGUMENT = re.compile(rf"({_NUMBER}|\(.*\))(\+.*)?|true|false|none|[^:|+(]*=.*", re.IGNORECASE)
_TITLES = {
    "ddp": "plain DDP, fp32",
    "torch:fp16": "torch's fp16 hook",
    "torch:bf16": "torch's bf16 hook",
    "script": "the script as it is",
}


@dataclass(frozen=True)
class Method:
    """One way to exchange gradients.

    Args:
        name: as users write it.
        title: as people read it.
        kind: "torch", "thinwire", "optimizer" or "script".
        compressor, feedback: of thinwire's own.
        rank: of PyTorch's PowerSGD.
        named: whether it goes to `attach` by its name.
    """

    name: str
    title: str
    kind: str
    compressor: str = ""
    feedback: str = ""
    rank: int = 0
    named: bool = False


# The optimizers by name: class, and title.
OPTIMIZERS = {
    "onebit-adam": ("OneBitAdam", "1-bit Adam"),
    "onebit-lamb": ("OneBitLamb", "1-bit LAMB"),
    "zero-one-adam": ("ZeroOneAdam", "0/1 Adam"),
}


def split(text: str) -> list[str]:
    """The methods in a list: separated by ';', or by commas that do not separate arguments.

    >>> split("none, quantize:4,stochastic=true, warmup:5,(topk:0.01)+ef14")
    ['none', 'quantize:4,stochastic=true', 'warmup:5,(topk:0.01)+ef14']
    """
    from thinwire.spec import split as split_at

    try:
        if ";" in text:
            return [part for part in split_at(text, ";") if part]
        methods: list[str] = []
        for part in split_at(text, ","):
            if methods and ":" in methods[-1] and _ARGUMENT.fullmatch(part) and part != "none":
                methods[-1] += f",{part}"
            elif part:
                methods.append(part)
    except ValueError as error:
        raise SettingError(f"--with: {error}") from None
    return methods


def read(text: str) -> Method:
    """The method of that name. Raises SettingError that says what is known."""
    name = text.strip().lower()
    if name in _TITLES:
        return Method(name, _TITLES[name], "script" if name == "script" else "torch")
    if name in OPTIMIZERS:
        from thinwire.optim.base import ONE_BIT

        return Method(name, OPTIMIZERS[name][1], "optimizer", str(ONE_BIT))
    if name.startswith("torch:"):
        return _powersgd(name)
    from thinwire.methods import method_of

    try:
        method = method_of(name)
    except ValueError as error:
        raise SettingError(f"{text!r}: {error}") from None
    if method is not None:
        recipe = method.recipe()
        made, remembered = str(recipe.compressor), str(recipe.feedback)
        return Method(recipe.name, recipe.name, "thinwire", made, remembered, named=True)
    from thinwire.feedback import feedback_for
    from thinwire.policies.base import POLICIES, policy_of

    # Patterns of names may have capitals.
    parts = _at_plus(text.strip() if POLICIES.knows(name) else name)
    compressor, *feedback = parts
    if len(feedback) > 1:
        raise SettingError(f"{text!r}: a method is COMPRESSOR or COMPRESSOR+FEEDBACK")

    try:
        chosen = policy_of(compressor)
        remembering = feedback_for(chosen.main, feedback[0] if feedback else "auto")
    except (TypeError, ValueError) as error:
        known = "ddp, torch:fp16, torch:bf16, torch:powersgd, COMPRESSOR or POLICY[+FEEDBACK]"
        raise SettingError(f"{text!r} is no method ({known}): {error}") from None
    name = str(chosen) if remembering.name == "none" else f"{chosen}+{remembering}"
    return Method(name, name, "thinwire", str(chosen), str(remembering))


def _at_plus(text: str) -> list[str]:
    """Split at each plus outside parentheses and quotes, but not at that of 1e+3."""
    from thinwire.spec import split as split_at

    try:
        first, *others = split_at(text, "+")
    except ValueError as error:
        raise SettingError(f"{text!r}: {error}") from None
    parts = [first]
    for other in others:
        if other[:1].isalpha():
            parts.append(other)
        else:
            parts[-1] += f"+{other}"
    return parts


def _powersgd(name: str) -> Method:
    match = re.fullmatch(r"torch:powersgd(?::(\d+))?", name)
    if match is None or match[1] == "0":
        hooks = "torch:fp16, torch:bf16, torch:powersgd, torch:powersgd:RANK"
        raise SettingError(f"unknown hook {name!r}, known: {hooks}")
    rank = int(match[1] or 2)
    return Method(name, f"torch's PowerSGD hook, rank {rank}, one bucket", "torch", rank=rank)
