"""The training example: everything `jaxsparse` needs around it, and nothing more."""
