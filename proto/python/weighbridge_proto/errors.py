"""What a failure says: a canonical code, a stable reason, a sentence for people, and figures for programs.

One value, :class:`RpcFailure`, stands for a failure on every side: a servicer raises it (:class:`RequestError`), the
server puts it on the wire as ``google.rpc.Status``, a client reads it back, and an event stream carries it as
``weighbridge.memory.v1.Failure``.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped] # ships no types
from grpc_status import rpc_status

from weighbridge_proto.memory.v1 import failure_pb2

DOMAIN = "weighbridge"
"""``ErrorInfo.domain`` of every failure that we state ourselves."""

MAX_MESSAGE_CHARS = 1024
MAX_STATUS_BYTES = 6 * 1024
"""Longest serialised status. It travels in the trailers as base64 (4/3), beside the message once more, and
HTTP/2 peers refuse trailers above 8 to 16 KiB: the whole call would then end as an unrelated error."""

UNREACHABLE = "UNREACHABLE"
"""Reason of a call that reached nobody: no socket, no listener, or the connection broke."""

TRANSPORT_ERROR = "transport_error"
"""Metadata of such a call: gRPC's own words for what happened to the connection."""

_GONE = (
    "A service is not there, or went away during the call. A suite that runs starts it again: try again in a few "
    "seconds. If that does not help, `weighbridge doctor` says what is wrong."
)

_STATUS_KEY = "grpc-status-details-bin"
_RETRY_KEY = "retry_after_seconds"
_CODE_OF_NUMBER: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def code_of(number: int | grpc.StatusCode | None) -> grpc.StatusCode:
    """The status code with this canonical number; unknown numbers are ``UNKNOWN``, none is ``OK``."""
    if isinstance(number, grpc.StatusCode):
        return number
    return _CODE_OF_NUMBER.get(number or 0, grpc.StatusCode.UNKNOWN)


@dataclass(frozen=True)
class RpcFailure:
    """One failure of one call.

    Attributes:
        code: canonical status code.
        reason: stable UPPER_SNAKE name of the cause, for programs.
        message: a sentence for people: what, where, what to do. Sizes in GiB.
        metadata: figures behind the message, decimal strings keyed by lower_snake names.
        retry_after_s: seconds after which trying again makes sense; None where waiting does not help.
        field_violations: (field path, what is wrong with it) of a bad request.
        quota_violations: (what is short, by how much) where bytes are missing.
        is_ours: a weighbridge service stated the reason; False where it was derived from the code alone.
    """

    code: grpc.StatusCode
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    retry_after_s: float | None = None
    field_violations: tuple[tuple[str, str], ...] = ()
    quota_violations: tuple[tuple[str, str], ...] = ()
    is_ours: bool = field(default=True, compare=False)

    def to_status(self) -> status_pb2.Status:
        """The failure as ``google.rpc.Status``.

        The message is cut at :data:`MAX_MESSAGE_CHARS`; details that would make the status larger than
        :data:`MAX_STATUS_BYTES` are left out, the reason never.
        """
        status = status_pb2.Status(code=self.code.value[0], message=_cut(self.message))
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)
        room = MAX_STATUS_BYTES - status.ByteSize() - info.ByteSize() - 128  # 128: type URLs and length prefixes
        for key, value in self.metadata.items():
            # An entry costs its texts and at most 12 bytes of tags and lengths.
            room -= len(key.encode()) + len(value.encode()) + 12
            if room < 0:
                break
            info.metadata[key] = value
        details: list[message.Message] = [info]
        if self.retry_after_s is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromNanoseconds(round(max(0.0, self.retry_after_s) * 1e9))
            details.append(retry)
        if self.field_violations:
            details.append(
                error_details_pb2.BadRequest(
                    field_violations=[
                        error_details_pb2.BadRequest.FieldViolation(field=name, description=_cut(text))
                        for name, text in self.field_violations
                    ]
                )
            )
        if self.quota_violations:
            details.append(
                error_details_pb2.QuotaFailure(
                    violations=[
                        error_details_pb2.QuotaFailure.Violation(subject=subject, description=_cut(text))
                        for subject, text in self.quota_violations
                    ]
                )
            )
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            if detail is info or status.ByteSize() + packed.ByteSize() + 4 <= MAX_STATUS_BYTES:
                status.details.append(packed)
        return status

    def to_grpc_status(self) -> grpc.Status:
        """What ``context.abort_with_status`` takes."""
        return rpc_status.to_status(self.to_status())

    @classmethod
    def from_status(cls, status: status_pb2.Status) -> "RpcFailure":
        """Read a ``google.rpc.Status``; details of kinds that we do not use are skipped."""
        code = code_of(status.code)
        reason, metadata, is_ours = "", dict[str, str](), False
        retry_after_s: float | None = None
        fields: list[tuple[str, str]] = []
        quotas: list[tuple[str, str]] = []
        for packed in status.details:
            info = error_details_pb2.ErrorInfo()
            retry = error_details_pb2.RetryInfo()
            bad_request = error_details_pb2.BadRequest()
            quota = error_details_pb2.QuotaFailure()
            try:
                if packed.Unpack(info):
                    reason, metadata, is_ours = info.reason, dict(info.metadata), info.domain == DOMAIN
                elif packed.Unpack(retry):
                    retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
                elif packed.Unpack(bad_request):
                    fields += [(v.field, v.description) for v in bad_request.field_violations]
                elif packed.Unpack(quota):
                    quotas += [(v.subject, v.description) for v in quota.violations]
            except (message.DecodeError, ValueError):
                continue  # a foreign server's broken detail must not hide the status itself
        return cls(
            code, reason or code.name, status.message, metadata, retry_after_s, tuple(fields), tuple(quotas), is_ours
        )

    @classmethod
    def from_rpc_error(cls, error: grpc.RpcError) -> "RpcFailure":
        """Read a failed call, whoever failed it.

        A status without our details (the transport's own, a foreign server's) gets its reason from the code:
        ``UNREACHABLE`` for ``UNAVAILABLE``, else the code's name.
        """
        code = code_of(error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN)
        text = (error.details() if hasattr(error, "details") else None) or ""
        for key, value in _trailers(error):
            if key == _STATUS_KEY and isinstance(value, bytes):
                status = status_pb2.Status()
                try:
                    status.ParseFromString(value)
                except message.DecodeError:
                    continue
                if code_of(status.code) is code:
                    return cls.from_status(status)
        if code is grpc.StatusCode.UNAVAILABLE:
            # gRPC's words ("Stream removed", a socket's errno) are for programs and reports, not for people.
            return cls(code, UNREACHABLE, _GONE, {TRANSPORT_ERROR: text} if text else {}, is_ours=False)
        return cls(code, code.name, text or f"The call ended with {code.name}.", is_ours=False)

    def to_message(self) -> failure_pb2.Failure:
        """The failure as an event carries it. Violations stay behind; the wait is kept as a figure."""
        metadata = dict(self.metadata)
        if self.retry_after_s is not None:
            metadata[_RETRY_KEY] = repr(self.retry_after_s)
        return failure_pb2.Failure(code=self.code.value[0], reason=self.reason, message=self.message, metadata=metadata)

    @classmethod
    def from_message(cls, failure: failure_pb2.Failure) -> "RpcFailure":
        """Read what :meth:`to_message` wrote."""
        metadata = dict(failure.metadata)
        try:
            retry_after_s: float | None = float(metadata[_RETRY_KEY])
        except (KeyError, ValueError):
            retry_after_s = None
        if retry_after_s is not None and math.isfinite(retry_after_s):
            del metadata[_RETRY_KEY]
        else:
            retry_after_s = None
        code = code_of(failure.code)
        return cls(code, failure.reason or code.name, failure.message, metadata, retry_after_s)


class RequestError(Exception):
    """A call that must fail, and how. Servicers raise it; the server turns it into the call's status."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, object] = MappingProxyType({}),
        retry_after_s: float | None = None,
        field_violations: Iterable[tuple[str, str]] = (),
        quota_violations: Iterable[tuple[str, str]] = (),
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.failure = RpcFailure(
            code,
            reason,
            message,
            {key: str(value) for key, value in metadata.items()},
            retry_after_s,
            tuple(field_violations),
            tuple(quota_violations),
        )

    @classmethod
    def from_failure(cls, failure: RpcFailure) -> "RequestError":
        """An error that ends this call as ``failure`` ended another."""
        return cls(
            failure.code,
            failure.reason,
            failure.message,
            metadata=failure.metadata,
            retry_after_s=failure.retry_after_s,
            field_violations=failure.field_violations,
            quota_violations=failure.quota_violations,
        )

    @classmethod
    def from_rpc_error(cls, error: grpc.RpcError) -> "RequestError":
        """An error that ends this call as the call to another service ended."""
        return cls.from_failure(RpcFailure.from_rpc_error(error))


def invalid_argument(
    field: str,
    description: str,
    reason: str = "INVALID_ARGUMENT",
    metadata: Mapping[str, object] = MappingProxyType({}),
) -> RequestError:
    """A request whose ``field`` (its path in the request) is wrong, whatever the state of the system."""
    return RequestError(
        grpc.StatusCode.INVALID_ARGUMENT,
        reason,
        f"{field}: {description}",
        metadata=metadata,
        field_violations=[(field, description)],
    )


def not_found(reason: str, message: str, metadata: Mapping[str, object] = MappingProxyType({})) -> RequestError:
    """A thing that the request names does not exist, or the caller may not know that it does."""
    return RequestError(grpc.StatusCode.NOT_FOUND, reason, message, metadata=metadata)


def failed_precondition(
    reason: str, message: str, metadata: Mapping[str, object] = MappingProxyType({})
) -> RequestError:
    """The system is not in the state that the call needs, and repeating the call alone does not help."""
    return RequestError(grpc.StatusCode.FAILED_PRECONDITION, reason, message, metadata=metadata)


def unavailable(
    reason: str,
    message: str,
    retry_after_s: float | None = None,
    metadata: Mapping[str, object] = MappingProxyType({}),
) -> RequestError:
    """The service cannot do it now; the same call may succeed later."""
    return RequestError(grpc.StatusCode.UNAVAILABLE, reason, message, metadata=metadata, retry_after_s=retry_after_s)


def resource_exhausted(
    reason: str,
    message: str,
    quota_violations: Iterable[tuple[str, str]] = (),
    retry_after_s: float | None = None,
    metadata: Mapping[str, object] = MappingProxyType({}),
) -> RequestError:
    """Something is used up: bytes, places in a queue, concurrent calls."""
    return RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        reason,
        message,
        metadata=metadata,
        retry_after_s=retry_after_s,
        quota_violations=quota_violations,
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"


def _trailers(error: grpc.RpcError) -> Iterable[tuple[str, Any]]:
    # Any: the synchronous and the asynchronous error have different types here, and both are pairs.
    trailers: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    return [(key, value) for key, value in trailers or ()]
