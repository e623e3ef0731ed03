"""How often to save: what an interval between two checkpoints costs, and the best one."""

from __future__ import annotations

import math


def best_interval(save_seconds: float, between_interruptions: float) -> float:
    """Return the seconds between two saves that lose least: sqrt(2 x duration of a save x time between interruptions).

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006),
    its first-order term (Young, 1974).

    Args:
        save_seconds: Seconds that a save takes from the training.
        between_interruptions: Mean seconds between two interruptions.
    """
    return math.sqrt(2 * save_seconds * between_interruptions)


def lost_share(interval: float, save_seconds: float, between_interruptions: float) -> float:
    """Return the share of the training time that saves and repeated work take, as Young and Daly estimate it.

    Args:
        interval: Seconds between two saves.
        save_seconds: Seconds that a save takes from the training.
        between_interruptions: Mean seconds between two interruptions; each loses half an interval on average.
    """
    return save_seconds / interval + interval / 2 / between_interruptions
