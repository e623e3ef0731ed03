"""From a job and its settings to a plan, without side effects."""
