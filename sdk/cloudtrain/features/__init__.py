"""What users can do besides running a job: each folder has its commands, its output and its logic.

No feature imports another, and the packages below know features only by the table of commands in `cli`.
"""
