"""Models in Flax linen, one file each."""
