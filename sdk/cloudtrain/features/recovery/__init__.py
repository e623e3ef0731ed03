"""Runs that continue by themselves: a controller starts the next attempt after an outside cause has ended one."""
