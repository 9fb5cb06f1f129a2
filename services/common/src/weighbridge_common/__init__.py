"""What every weighbridge service process does the same way.

``server`` runs a service, ``settings`` reads its variables, ``errors`` and ``telemetry`` hold the interceptors,
``logs`` the log format, ``listening`` the addresses, ``processes`` who a process is and what it holds, ``tasks`` the
background work, ``sizes`` how bytes are written for people.
"""
