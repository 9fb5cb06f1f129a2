"""What every service shows on the wire: reflection, health per service name, and a reason behind every refusal."""

import grpc
import pytest
from google.protobuf import empty_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from weighbridge_proto.errors import RpcFailure

from tests.harness import Suite

pytestmark = pytest.mark.mlx

SERVICES = {
    "ledger": ["weighbridge.ledger.v1.LedgerService"],
    "fit": ["weighbridge.fit.v1.FitService"],
    "engine-mlx": [
        "weighbridge.engines.v1.EngineService",
        "weighbridge.engines.v1.ChatService",
        "weighbridge.engines.v1.ImageService",
    ],
}

NOT_YET = {
    "engine-mlx": ["/weighbridge.engines.v1.ImageService/GenerateImage"],
}
"""Rpcs that are in the contract and not in this version."""


def channel_of(suite: Suite, name: str) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{suite.run_dir / name}.sock")


@pytest.mark.parametrize("name", SERVICES)
def test_reflection_lists_the_services(suite: Suite, name: str) -> None:
    with channel_of(suite, name) as channel:
        listed = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert listed >= {*SERVICES[name], "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


@pytest.mark.parametrize("name", SERVICES)
def test_health_answers_per_service_name(suite: Suite, name: str) -> None:
    with channel_of(suite, name) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ["", *SERVICES[name]]:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=10)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(("name", "method"), [(n, m) for n, methods in NOT_YET.items() for m in methods])
def test_what_is_not_there_yet_says_so_with_a_reason(suite: Suite, name: str, method: str) -> None:
    with channel_of(suite, name) as channel:
        streams = method.endswith("GenerateImage")
        make = channel.unary_stream if streams else channel.unary_unary
        call = make(
            method,
            request_serializer=empty_pb2.Empty.SerializeToString,
            response_deserializer=empty_pb2.Empty.FromString,
        )
        with pytest.raises(grpc.RpcError) as refused:
            answer = call(empty_pb2.Empty(), timeout=10)
            list(answer)
    failure = RpcFailure.from_rpc_error(refused.value)
    assert failure.code is grpc.StatusCode.UNIMPLEMENTED
    assert failure.reason not in ("", "UNIMPLEMENTED"), "a reason of ours, not gRPC's own"
    assert failure.message
