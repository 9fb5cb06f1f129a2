"""torch's element types under the names that safetensors gives them, so that facts of both formats speak alike.

Names and widths are those of torch 2.13 (`torch.storage._dtype_to_storage_type_map`, `_new_dtypes`).
"""

from typing import NamedTuple


class ElementType(NamedTuple):
    """A name, the bytes of one element of storage, and how many elements of a tensor share one element of storage."""

    name: str
    width: int
    packs: int = 1


# dtypes by their name in module `torch`.
DTYPES = {
    "float64": ElementType("F64", 8),
    "double": ElementType("F64", 8),
    "float32": ElementType("F32", 4),
    "float": ElementType("F32", 4),
    "float16": ElementType("F16", 2),
    "half": ElementType("F16", 2),
    "bfloat16": ElementType("BF16", 2),
    "int64": ElementType("I64", 8),
    "long": ElementType("I64", 8),
    "int32": ElementType("I32", 4),
    "int": ElementType("I32", 4),
    "int16": ElementType("I16", 2),
    "short": ElementType("I16", 2),
    "int8": ElementType("I8", 1),
    "uint8": ElementType("U8", 1),
    "uint16": ElementType("U16", 2),
    "uint32": ElementType("U32", 4),
    "uint64": ElementType("U64", 8),
    "bool": ElementType("BOOL", 1),
    "complex32": ElementType("C32", 4),
    "complex64": ElementType("C64", 8),
    "complex128": ElementType("C128", 16),
    "float8_e5m2": ElementType("F8_E5M2", 1),
    "float8_e4m3fn": ElementType("F8_E4M3", 1),
    "float8_e5m2fnuz": ElementType("F8_E5M2FNUZ", 1),
    "float8_e4m3fnuz": ElementType("F8_E4M3FNUZ", 1),
    "float8_e8m0fnu": ElementType("F8_E8M0", 1),
    # Two values per element of storage; the shape counts the elements.
    "float4_e2m1fn_x2": ElementType("F4_E2M1_X2", 1),
    "qint8": ElementType("QI8", 1),
    "quint8": ElementType("QU8", 1),
    "qint32": ElementType("QI32", 4),
    "quint4x2": ElementType("QU4X2", 1, 2),
    "quint2x4": ElementType("QU2X4", 1, 4),
    "bits1x8": ElementType("BITS1X8", 1),
    "bits2x4": ElementType("BITS2X4", 1),
    "bits4x2": ElementType("BITS4X2", 1),
    "bits8": ElementType("BITS8", 1),
    "bits16": ElementType("BITS16", 2),
    # Shells that hold each value in a byte (torch 2.3 and later).
    **{f"uint{bits}": ElementType(f"U{bits}", 1) for bits in range(1, 8)},
    **{f"int{bits}": ElementType(f"I{bits}", 1) for bits in range(1, 8)},
}

# Storage classes by their name in modules `torch`, `torch.cuda` and `torch.storage`.
STORAGES = {
    "DoubleStorage": DTYPES["float64"],
    "FloatStorage": DTYPES["float32"],
    "HalfStorage": DTYPES["float16"],
    "BFloat16Storage": DTYPES["bfloat16"],
    "LongStorage": DTYPES["int64"],
    "IntStorage": DTYPES["int32"],
    "ShortStorage": DTYPES["int16"],
    "CharStorage": DTYPES["int8"],
    "ByteStorage": DTYPES["uint8"],
    "BoolStorage": DTYPES["bool"],
    "ComplexDoubleStorage": DTYPES["complex128"],
    "ComplexFloatStorage": DTYPES["complex64"],
    "QUInt8Storage": DTYPES["quint8"],
    "QInt8Storage": DTYPES["qint8"],
    "QInt32Storage": DTYPES["qint32"],
    "QUInt4x2Storage": DTYPES["quint4x2"],
    "QUInt2x4Storage": DTYPES["quint2x4"],
    # Bytes; the tensor says what they are.
    "UntypedStorage": DTYPES["uint8"],
    "TypedStorage": DTYPES["uint8"],
}
STORAGE_MODULES = frozenset({"torch", "torch.cuda", "torch.storage"})
