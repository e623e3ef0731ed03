"""What a job's code shows without being run: its source is parsed, and nothing is imported.

Each rule reads the `syntax.Module` of a file, which is parsed and walked once. `conventions` collects the answers.
"""
