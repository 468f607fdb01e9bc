"""Whatever is written on the command line: a run's objects, or an error in words."""

import os
import pickle
import runpy
from pathlib import Path

import pytest
from absl import flags
from fuzzing import budget, tick
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from train import build
from train import flags as train_flags
from train.checks import check
from train.errors import SetupError

# ml_collections loads config files in a way that Python is giving up.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

DIGITS = Path(__file__).parents[1] / "configs" / "digits.py"
NAMES = "dense topk topk_sign threshold random_k dgc power_sgd server ema_limit penalty"
NAMES = [*NAMES.split(), "lgc_server", "lgc_ring", "g_top_k", "frequency"]


def parse(*args):
    values = flags.FlagValues()
    train_flags.parse(["main", *args], values)
    return values.config


def keys(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key


KEYS = sorted(keys(runpy.run_path(str(DIGITS))["get_config"](",".join(NAMES))))


class Opens:
    """Unpickled, it leaves its trace."""

    def __reduce__(self):
        return os.putenv, ("FUZZED", "1")


CODE = "__import__('os').environ.__setitem__('FUZZED', '1')"
NASTY = [
    *("", " ", "None", "nan", "inf", "-inf", "1e400", "-0.0", "1e-320", "1_0", "0x10"),
    *(
        "True",
        "()",
        "(1, 2)",
        "('a',)",
        "[1, [2]]",
        "{}",
        "{'name': 'top_k'}",
        "(1,",
        "'",
    ),
    *(CODE, f"[{CODE}]", f"f'{{{CODE}}}'", f"!!python/object/apply:eval [{CODE!r}]"),
    *(
        repr(pickle.dumps(Opens())),
        "$(touch fuzzed)",
        "../../etc",
        "%s%n",
        "{0.__class__}",
    ),
    *("9" * 400, "(" * 200, "\x00", "é\n", "a.b", "=1", "--config.steps=1"),
]
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.integers(-3, 300), st.floats(), st.floats(-2, 2)
)
WRITTEN = st.one_of(st.sampled_from(NASTY), NUMBERS.map(str), st.text(max_size=20))
UNKNOWN = st.text("abcdefghij_.=0-", max_size=12)
# Settings that differ, several at once, some of a name that there is not.
SETTINGS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(KEYS), st.sampled_from(KEYS), UNKNOWN), WRITTEN
    ),
    min_size=1,
    max_size=3,
)


def made(method, settings):
    """The objects of a run, or None where an error told what is wrong."""
    args = [f"--config.{key}={value}" for key, value in settings]
    try:
        config = parse(f"--config={DIGITS}:{method}", *args)
        check(config)
        return build.task(config), build.optimizer(config, method)
    except SetupError as error:
        told = str(error)
        assert len(told) > 10, told
        return None


@budget(quick=60)
@given(method=st.sampled_from(NAMES), settings=SETTINGS)
def test_what_is_written_is_taken_or_refused_in_words(method, settings):
    """No other exception than `SetupError`; nothing is executed or unpickled."""
    made(method, settings)
    assert "FUZZED" not in os.environ and not Path("fuzzed").exists()
    tick("config")
