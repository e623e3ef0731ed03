"""Serving of trained models: on this machine, and by SageMaker endpoints.

`package` makes the folder that AWS's Ray Serve image runs, of a run's code and weights. `served_run` serves it here.
"""
