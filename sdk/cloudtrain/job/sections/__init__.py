"""The sections of job.yaml: their models, in a module for each large section.

The docstring below a field is the field's only description: it gives unit, range and default, and is printed in the
reference page and the JSON schema.
"""
