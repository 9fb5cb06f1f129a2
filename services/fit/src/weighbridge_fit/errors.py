"""What can be wrong with a weight file, as a value: reason, place and a sentence."""

from enum import StrEnum

# Longer names are shortened in messages: a message travels in a call's trailers, which are small.
MAX_SHOWN = 80


def shown(name: str | bytes) -> str:
    """A name out of a file as it may stand in a message: quoted, short and printable, whatever the file says."""
    if isinstance(name, bytes):
        name = name.decode("utf-8", "replace")
    kept, more = (name, "") if len(name) <= MAX_SHOWN else (name[: MAX_SHOWN - 3], "...")
    quoted = repr(kept + more)
    # What cannot be printed becomes an escape of four to ten letters: so much less of such a name is shown.
    while len(quoted) > MAX_SHOWN + 2:
        kept = kept[: len(kept) * 3 // 4]
        quoted = repr(kept + "...")
    return quoted


def as_text(name: str) -> str:
    """A file's name as text that can travel: bytes that are not UTF-8 come as escapes."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


class WeightReason(StrEnum):
    """Stable reasons; they travel to clients in `google.rpc.ErrorInfo.reason`."""

    NOT_A_REGULAR_FILE = "NOT_A_REGULAR_FILE"
    UNREADABLE = "UNREADABLE"
    UNKNOWN_FORMAT = "UNKNOWN_FORMAT"
    NO_WEIGHTS = "NO_WEIGHTS"
    TRUNCATED = "TRUNCATED"
    BAD_MAGIC = "BAD_MAGIC"
    UNSUPPORTED_VERSION = "UNSUPPORTED_VERSION"
    HEADER_LENGTH_INVALID = "HEADER_LENGTH_INVALID"
    HEADER_TOO_LARGE = "HEADER_TOO_LARGE"
    HEADER_INVALID = "HEADER_INVALID"
    PARSE_BUDGET = "PARSE_BUDGET"
    TOO_DEEP = "TOO_DEEP"
    DUPLICATE_KEY = "DUPLICATE_KEY"
    COUNT_EXCEEDS_FILE = "COUNT_EXCEEDS_FILE"
    BAD_VALUE_TYPE = "BAD_VALUE_TYPE"
    BAD_ALIGNMENT = "BAD_ALIGNMENT"
    BAD_SHAPE = "BAD_SHAPE"
    BAD_OFFSETS = "BAD_OFFSETS"
    SIZE_MISMATCH = "SIZE_MISMATCH"
    SPLIT_INCOMPLETE = "SPLIT_INCOMPLETE"
    SEVERAL_MODELS = "SEVERAL_MODELS"
    ARCHIVE_INVALID = "ARCHIVE_INVALID"
    PICKLE_INVALID = "PICKLE_INVALID"
    UNSUPPORTED_TENSOR = "UNSUPPORTED_TENSOR"
    LEGACY_CHECKPOINT = "LEGACY_CHECKPOINT"
    CONFIG_INVALID = "CONFIG_INVALID"
    ARCHITECTURE_UNSUPPORTED = "ARCHITECTURE_UNSUPPORTED"


class WeightError(Exception):
    """A weight file or model folder that cannot be priced.

    `file` is a name relative to the model, never a path of this machine. `offset` is the byte in that file where
    reading stopped making sense, or None when no single byte is to blame.
    """

    def __init__(self, reason: WeightReason, message: str, *, file: str = "", offset: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.file = as_text(file)
        self.offset = offset

    def in_file(self, file: str) -> "WeightError":
        """The same error with the file named, for readers that only see bytes."""
        if self.file:
            return self
        return WeightError(self.reason, self.message, file=file, offset=self.offset)

    def sentence(self) -> str:
        """What, where: one sentence for a person."""
        where = f" in {self.file}" if self.file else ""
        at = f" at byte {self.offset}" if self.offset is not None else ""
        return f"{self.message}{where}{at}"
