"""Exchanges: the only home of collectives."""

from .all_gather import all_gather as all_gather
from .g_top_k import g_top_k as g_top_k
from .server import server as server
from .shared_support import shared_support as shared_support
