"""Controllers: processes that start runs on their own, outlive the command, and continue after they were killed.

A controller records what it is about to do before it does it: it reserves the id of a run, records it, and only then
submits the run under this id. So it can be killed at any moment: the next one watches a recorded run that exists, and
submits one that does not.
"""
