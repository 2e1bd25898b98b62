"""Which feedback can go through a hierarchical exchange."""

from thinwire.collectives.nodes import Layers
from thinwire.feedback import DGC, EF21, Feedback, Vote


def check_layers(feedback: Feedback, layers: Layers) -> None:
    """Refuse a feedback that a hierarchical exchange would break."""
    if isinstance(feedback, DGC):
        raise ValueError(
            "DGC cannot go through 'hierarchical': it stops the momentum of elements that a rank "
            "has sent itself, and between nodes only sums of ranks are sent"
        )
    if isinstance(feedback, Vote):
        raise ValueError(
            "Vote cannot go through 'hierarchical': a majority of nodes is not one of ranks"
        )
    if isinstance(feedback, EF21) and not (layers.remembers or layers.inner.lossless):
        raise ValueError(
            f"{feedback} with inner {layers.inner} needs inner_feedback='ef14': what is rounded "
            "off inside a node and forgotten would part it from the mean that all ranks know"
        )
