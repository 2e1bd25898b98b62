"""All feedbacks by name. A new one is one line in `_ALL`."""

from thinwire.compressors import Compressor, Joint
from thinwire.feedback.base import Feedback, NoFeedback
from thinwire.feedback.dgc import DGC
from thinwire.feedback.ef14 import EF14
from thinwire.feedback.ef21 import EF21, EF21M
from thinwire.feedback.vote import Vote
from thinwire.spec import build

_ALL: tuple[type[Feedback], ...] = (NoFeedback, EF14, EF21, EF21M, DGC, Vote)
BY_NAME: dict[str, type[Feedback]] = {kind.name: kind for kind in _ALL}


def list_feedbacks() -> dict[str, str]:
    """Every feedback's name in spec strings, with one line on what it does."""
    return {name: (kind.__doc__ or "").partition("\n")[0] for name, kind in BY_NAME.items()}


def parse_feedback(spec: str) -> Feedback:
    """The feedback that a spec string names, such as ``ef14`` or ``ef21m:0.1,storage=bf16``.

    ``str(feedback)`` is the inverse. Raises ValueError that says what is wrong and what is known.
    """
    if not isinstance(spec, str):
        raise TypeError(f"a spec is a string such as 'ef14', got {spec!r}")
    return build(spec, "feedback", BY_NAME)


def feedback_for(compressor: Compressor, feedback: Feedback | str) -> Feedback:
    """The feedback that a compressor is used with: what loses nothing needs none.

    Args:
        feedback: one, or its spec, or "auto": EF14 for what is biased, none for what is right on
            average, what its paper has for a joint one.
    """
    if isinstance(feedback, str) and feedback.strip().lower() == "auto":
        if isinstance(compressor, Joint):
            return parse_feedback(compressor.feedback)
        return NoFeedback() if compressor.lossless or compressor.unbiased else EF14()
    chosen = feedback if isinstance(feedback, Feedback) else parse_feedback(feedback)
    return NoFeedback() if compressor.lossless and isinstance(chosen, EF14) else chosen
