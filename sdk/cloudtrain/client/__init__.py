"""The verbs of cloudtrain: plan, check, submit, follow, stop."""
