"""Moments and spans of time as messages."""

from google.protobuf import duration_pb2, timestamp_pb2


def timestamp(wall: float) -> timestamp_pb2.Timestamp:
    """Seconds since the epoch as a message."""
    message = timestamp_pb2.Timestamp()
    write_time(message, wall)
    return message


def write_time(message: timestamp_pb2.Timestamp, wall: float) -> None:
    """Set a message to seconds since the epoch."""
    seconds = int(wall)
    message.seconds = seconds
    message.nanos = int((wall - seconds) * 1e9)


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds as a message."""
    whole = int(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
