"""Set-up: a new job, the account's settings, this machine, and completion in a shell."""
