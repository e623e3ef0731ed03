"""Trackers: services such as MLflow and Weights & Biases that show the metrics of many runs beside each other.

`tracker.py` is the protocol that a service implements, and `background.py` what all of them have: a queue, retries,
and a limit at the end of the run. A process of its own (`process.py`, `service.py`) runs them on the first host, so that
training never waits for a service and never fails because of one. TensorBoard has no service: its files are written by
rank 0 itself (`tensorboard.py`).
"""
