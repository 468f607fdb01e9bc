"""Studies: what the claims in docs/results.md rest on, one sub-command each."""
