"""What is remembered between steps, so that compression loses nothing in the long run."""

from thinwire.feedback.base import Feedback, NoFeedback
from thinwire.feedback.dgc import DGC
from thinwire.feedback.ef14 import EF14
from thinwire.feedback.ef21 import EF21, EF21M
from thinwire.feedback.registry import feedback_for, list_feedbacks, parse
from thinwire.feedback.vote import Vote

__all__ = [
    "DGC",
    "EF14",
    "EF21",
    "EF21M",
    "Feedback",
    "NoFeedback",
    "Vote",
    "feedback_for",
    "list_feedbacks",
    "parse",
]
