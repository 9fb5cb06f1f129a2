"""Sizes of the safetensors dtypes.

Names and widths are the format's own (safetensors 0.6, `Dtype`). A dtype that is not listed is counted by the bytes
of its tensors under its own name: new ones appear faster than readers do.
"""

# Types whose tensors are exactly elements x width: a shape that disagrees with its bytes is a malformed file.
BYTES_PER_ELEMENT = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
