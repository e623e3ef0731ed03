"""Training loop of a Task, evaluation, early stopping and the model folder."""
