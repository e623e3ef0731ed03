"""Costs: what runs and endpoints have cost, and the prices of instances."""
