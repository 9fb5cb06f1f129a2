"""Starts the suite's services as processes, keeps them up, and stops them in order: the machinery of ``up``."""
