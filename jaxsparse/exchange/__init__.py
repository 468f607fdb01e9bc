"""Exchanges: the only home of collectives."""

from .all_gather import all_gather as all_gather
