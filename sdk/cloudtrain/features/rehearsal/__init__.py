"""Rehearsals: run a job on this machine, interrupt it, resume it, and report what is proven."""
