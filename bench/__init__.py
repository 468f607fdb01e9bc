"""Measuring on this machine: test hosts behind links of limited rate."""
