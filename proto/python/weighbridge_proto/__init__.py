"""The contracts of weighbridge (generated packages) and what every caller of them shares.

Generated: ``weighbridge_proto.{memory,fit,ledger,engines}.v1``. Hand-written beside them:
``targets`` (where a service listens), ``channel`` (how to reach it), ``errors`` (what a failure says)
and ``telemetry`` (how a trace follows the call).
"""
