"""Weights of a training run, version by version, and what their changes take to send."""
