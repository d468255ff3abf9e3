"""The time of day, in one place, so that a test can stop it."""

import time


def now() -> float:
    """Seconds since the epoch."""
    return time.time()
