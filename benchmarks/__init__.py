"""Every figure of weighbridge as a ratio against a named baseline in the same run.

``python -m benchmarks [headers] [admission] [chat]`` runs the named ones, or all. Absolute times are printed only to
show the order of magnitude: the machines these run on differ and are noisy, the ratio of alternated measurements is
what can be compared.
"""
