"""Weights of a 0.5B model on their way: a trainer's ranks and servers' receivers, as processes with a control API each."""
