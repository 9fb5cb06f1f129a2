"""Files that are almost right, for hypothesis: a seed or its inside, changed in a few places."""

import struct

from hypothesis import strategies as st

from services.fit.fuzz import corpus
from services.fit.fuzz.targets import Target

# Numbers at the edges of every width, as the formats write them.
_EDGES = [0, 1, 2, 7, 0x7F, 0x80, 0xFF, *(2**bits - less for bits in (15, 16, 31, 32, 40, 63, 64) for less in (0, 1))]
# Pieces of the formats that a change of single bytes rarely makes.
_WORDS = {
    "safetensors": [
        b'"', b"\\", b"}", b"}}", b"{", b"[", b"]", b",", b":", b" ", b"0", b"-1", b"1.0", b"1e9", b"null", b"\xff",
        b'"dtype":"F32",', b'"shape":[],', b'"data_offsets":[0,0]', b'"__metadata__":{"a":"b"},', b"\\ud800", b'"},"',
        b"9" * 25, b"[" * 40, b"[0," * 12,
    ],
    "gguf": [
        corpus.gguf_text("k"), corpus.gguf_text(b"\xff"), struct.pack("<I", corpus.ARRAY), struct.pack("<I", 99),
        corpus.gguf_array(corpus.ARRAY, 1), corpus.gguf_array(corpus.STRING, 2**60), corpus.gguf_array(0, 2**63),
        corpus.gguf_pair("general.alignment", corpus.U32, bytes(4)), corpus.gguf_tensor("w", (2**33, 2**33)),
        corpus.gguf_tensor("v", (32,), 2, 2**64 - 32), b"GGUF",
    ],
    "checkpoint": [
        b"(", b"t", b"]", b"}", b")", b"R", b"Q", b"b", b"u", b"s", b"e", b"a", b"0", b"1", b"2", b".", b"N", b"\x81",
        b"\x85", b"\x86", b"\x87", b"\x93", b"\x94", b"q\x00", b"h\x00", b"h\xff", b"\x82\x01", b"i", b"o", b"P0\n",
        corpus.p_global("os", "system"), corpus.p_global("collections", "OrderedDict"), corpus.p_text("storage"),
        corpus.p_global("torch._utils", "_rebuild_tensor_v2"), corpus.p_global("torch._utils", "_rebuild_tensor_v3"),
        corpus.p_global("torch._utils", "_rebuild_sparse_tensor"), corpus.p_int(2**40), corpus.p_int(-1),
        corpus.p_storage("0", "FloatStorage", 12), corpus.p_storage("0", "UntypedStorage", 48, "torch.storage"),
        corpus.p_tensor(corpus.p_storage("1", "HalfStorage", 5), [5]), corpus.p_ints([2**40, 2**40]),
        corpus.p_call("builtins", "eval", corpus.p_text("1")), b"PK\x05\x06", b"PK\x01\x02",
    ],
}  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, content: bytes, words: list[bytes]) -> bytes:
    """`content` with one to five changes."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 5))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["flip", "word", "edge", "cut", "double", "over", "end"])):
            case "flip":
                data[at] = draw(st.integers(0, 255))
            case "word":
                data[at:at] = draw(st.sampled_from(words))
            case "edge":
                value, width = draw(st.sampled_from(_EDGES)), draw(st.sampled_from([1, 2, 4, 8]))
                data[at : at + width] = (value % 256**width).to_bytes(width, "little")
            case "cut":
                del data[at : at + draw(st.integers(1, 40))]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 80))]
            case "over":
                word = draw(st.sampled_from(words))
                data[at : at + len(word)] = word
            case "end":
                del data[at:]
    return bytes(data)


def files(name: str, target: Target) -> st.SearchStrategy[bytes]:
    """Whole files of a format: changed seeds, and files whose inside was changed and put into place."""
    words = _WORDS[name]
    whole = [changed(seed, words) for seed in target.seeds()]
    inside = [changed(part, words).map(target.wrap) for part in insides(name)]
    loose = st.lists(st.sampled_from(words), max_size=30).map(b"".join).map(target.wrap)
    return st.one_of(*whole, *inside, *inside, loose)


def insides(name: str) -> list[bytes]:
    """What lies within the frame of each seed: the header's text, what follows the version, the pickle."""
    seeds = {
        "safetensors": corpus.safetensors_seeds, "gguf": corpus.gguf_seeds, "checkpoint": corpus.checkpoint_seeds,
    }[name]()  # fmt: skip
    if name == "safetensors":
        return [seed[8 : 8 + int.from_bytes(seed[:8], "little")] for seed in seeds]
    if name == "gguf":
        return [seed[8:] for seed in seeds]
    return corpus.checkpoint_pickles()
