"""Rendering of public objects: short text for `repr`, small HTML tables for notebooks, figures and live output."""
