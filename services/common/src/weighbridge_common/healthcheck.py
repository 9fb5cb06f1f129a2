"""``python -m weighbridge_common.healthcheck ledger``: does a service on this machine serve? What containers ask."""

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2
from weighbridge_proto import targets

DEFAULT_TIMEOUT_S = 3.0
"""Seconds one question may take. A serving process answers within milliseconds, even while it loads a model."""


def check(target: str, service: str = "", timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
    """Ask the health service at ``target`` about ``service`` (empty: the whole process).

    Returns:
        The status by name: ``SERVING``, ``NOT_SERVING``, ``SERVICE_UNKNOWN`` or ``UNKNOWN``.

    Raises:
        grpc.RpcError: nobody answered within ``timeout_s``, or there is no such service.
    """
    # A synchronous channel: this process asks one question and ends.
    with grpc.insecure_channel(target) as channel:
        ask = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = ask(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the status; 0 when the service serves, 1 when it does not, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="weighbridge_common.healthcheck", description="Ask a service whether it serves."
    )
    parser.add_argument("name", nargs="?", choices=targets.SERVICES, help="a service, found the way clients find it")
    parser.add_argument("--target", help="a gRPC target instead of a name, such as unix:/path/to.sock")
    parser.add_argument("--service", default="", help="the gRPC service to ask about; empty: the whole process")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, help="seconds to wait for the answer")
    options = parser.parse_args(arguments)
    if (options.name is None) == (options.target is None):
        parser.error("say which service: a name, or --target")
    target = options.target or targets.target(options.name)
    try:
        status = check(target, options.service, options.timeout)
    except grpc.RpcError as error:
        print(f"{target}: {error.code().name} {error.details()}", file=sys.stderr)
        return 1
    print(f"{target}: {status}")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
