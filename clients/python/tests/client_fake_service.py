"""A service of a few lines, run as a process by the tests of `up`: ``NAME [MODE]``.

It serves health on its socket in the run folder and ends on SIGTERM. Modes: ``dies`` (ends by itself with code 7 and a
last line), ``deaf`` (ignores SIGTERM), ``mute`` (never serves).
"""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from weighbridge.reach import HEALTH_SERVICES


def main() -> None:
    name, mode = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    print(f"{name} starts as {os.getpid()}", flush=True)
    if mode == "dies":
        print("the disk is full", flush=True)
        sys.exit(7)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else lambda *_: stop.set())
    folder = Path(os.environ["WEIGHBRIDGE_RUN_DIR"])
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    healths = health.HealthServicer()
    for service in HEALTH_SERVICES[name]:
        healths.set(service, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healths, server)
    if mode != "mute":
        server.add_insecure_port(f"unix:{folder / name}.sock")
        server.start()
    while not stop.wait(0.05):
        pass
    with (folder / "stopped.txt").open("a") as order:
        order.write(f"{name}\n")
    server.stop(None).wait()


if __name__ == "__main__":
    main()
