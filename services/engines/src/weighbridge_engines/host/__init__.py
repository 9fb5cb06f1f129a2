"""Serves one engine behind an admission, whatever its kind.

``kind`` is what a kind of engine supplies; everything else is the same for all: ``plans`` asks fit, ``ledger`` and
``lease`` hold the lease, ``loads`` shares one load among several calls, ``residency`` is one loaded model from its
claim to its burial, ``engine_host`` owns the order of it all, and the servicers turn messages into calls.
"""
