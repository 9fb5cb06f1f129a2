"""The ledger as a process, with one more rpc on the same server: an empty server stream, the floor of any admission."""

from collections.abc import AsyncIterator

import grpc
from google.protobuf import empty_pb2
from weighbridge_common.server import AsyncClosable, ServerContext, run_service
from weighbridge_common.settings import load
from weighbridge_ledger.service.app import build_ledger
from weighbridge_ledger.settings import LedgerSettings

EMPTY_SERVICE = "weighbridge.benchmarks.v1.EmptyService"


async def _one_empty_message(request: empty_pb2.Empty, context: object) -> AsyncIterator[empty_pb2.Empty]:
    yield empty_pb2.Empty()


async def build(context: ServerContext) -> AsyncClosable | None:
    """The ledger as it is, and the floor beside it: both go through the same server and interceptors."""
    handler = grpc.unary_stream_rpc_method_handler(
        _one_empty_message,
        request_deserializer=empty_pb2.Empty.FromString,
        response_serializer=empty_pb2.Empty.SerializeToString,
    )
    context.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EMPTY_SERVICE, {"Stream": handler}),))
    return await build_ledger(context)


if __name__ == "__main__":
    run_service(load(LedgerSettings), "ledger", build)
