"""How much fuzzed tests try: little and always the same, or as scripts/fuzz asks."""

import collections
import os
import sys

from hypothesis import HealthCheck, settings

ASKED = int(os.environ.get("FUZZ_EXAMPLES", "0"))
_done: collections.Counter = collections.Counter()


def budget(quick, values=1):
    """Settings of a test that tries so many values on each of its examples.

    Args:
      quick: examples where scripts/fuzz has not asked for a number of cases.
      values: cases in one example.
    """
    return settings(
        max_examples=-(-ASKED // values) if ASKED else quick,
        derandomize=not ASKED,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def tick(test, cases=1):
    """Counts cases; tells how far a long run is."""
    before = _done[test]
    _done[test] += cases
    if ASKED and before * 20 // ASKED != _done[test] * 20 // ASKED:
        print(f"{test}: {_done[test]} of {ASKED} cases", file=sys.stderr, flush=True)
