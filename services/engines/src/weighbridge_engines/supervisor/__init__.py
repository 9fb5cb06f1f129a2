"""Runs one engine process so that it never outlives its service, and explains how it ended.

``child`` starts, holds, watches and stops a process behind ``guard`` (the program between service and engine);
``records`` ends what a dead service left; ``output`` keeps what the process printed; ``readiness`` waits for it;
``exits`` and ``budget`` are the rules about how it ended and whether it may start again.
"""
