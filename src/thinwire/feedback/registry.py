"""All feedbacks by name. A new one is one more name in `FEEDBACKS.add`."""

from thinwire.compressors import Compressor
from thinwire.feedback.base import Feedback, NoFeedback
from thinwire.feedback.dgc import DGC
from thinwire.feedback.ef14 import EF14
from thinwire.feedback.ef21 import EF21, EF21M
from thinwire.feedback.vote import Vote
from thinwire.spec import Kind

FEEDBACKS: Kind[Feedback] = Kind("feedback", "feedbacks", Feedback, "ef14")
FEEDBACKS.add(NoFeedback, EF14, EF21, EF21M, DGC, Vote)


def list_feedbacks() -> dict[str, str]:
    """Every feedback's name in spec strings, with one line on what it does."""
    return FEEDBACKS.lines()


def parse(spec: str) -> Feedback:
    """The feedback that a spec string names, such as ``ef14`` or ``ef21m:0.1,storage=bf16``.

    ``str(feedback)`` is the inverse. Raises ValueError that says what is wrong and what is known.
    """
    return FEEDBACKS.parse(spec)


def feedback_for(compressor: Compressor, feedback: Feedback | str) -> Feedback:
    """The feedback that a compressor is used with: what loses nothing needs none.

    Args:
        feedback: one, or its spec, or "auto": EF14 for what is biased, none for what is right on
            average or has too large an error (see `Compressor.wants_residual`).
    """
    if isinstance(feedback, str) and feedback.strip().lower() == "auto":
        return EF14() if compressor.wants_residual else NoFeedback()
    chosen = feedback if isinstance(feedback, Feedback) else parse(feedback)
    return NoFeedback() if compressor.lossless and isinstance(chosen, EF14) else chosen
