"""Evaluations: the weights of a run on data, without training."""
