"""The job file: models, loader, schema, and the source text that it names."""
