"""Reducers: one method a file."""

from .dense import dense as dense
from .low_rank import low_rank as low_rank
from .sign_mean import sign_mean as sign_mean
from .sparse import sparse as sparse
