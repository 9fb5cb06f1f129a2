"""Turn ``weighbridge/**/*.proto`` into ``python/weighbridge_proto/**``: messages, gRPC stubs and their types.

protoc writes absolute imports that follow the .proto path (``weighbridge.fit.v1``). The Python home of
the generated code is ``weighbridge_proto``, so that ``import weighbridge`` stays free for the client
library. Only Python's import lines (and the type names in .pyi files) are rewritten; descriptors and
proto packages stay ``weighbridge.*``.
"""

import pathlib
import re
import shutil
import tempfile
from importlib.resources import files

from grpc_tools import protoc

_IMPORT = re.compile(r"\b(from|import) weighbridge\.")
_QUALIFIED_NAME = re.compile(r"(?<![\w.\"'/])weighbridge\.(?=\w+\.v\d)")


def generate(root: pathlib.Path) -> None:
    """Generate into ``root/python/weighbridge_proto``, replacing every generated folder there.

    Args:
        root: the folder that holds ``weighbridge/`` (the .proto files) and ``python/``.

    Raises:
        SystemExit: protoc found an error; it has already printed where.
    """
    protos = sorted(str(p.relative_to(root)) for p in (root / "weighbridge").rglob("*.proto"))
    target = root / "python" / "weighbridge_proto"
    with tempfile.TemporaryDirectory() as out:
        well_known_types = str(files("grpc_tools") / "_proto")
        code = protoc.main(
            ["protoc", f"-I{root}", f"-I{well_known_types}"]
            + [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
            + protos
        )
        if code:
            raise SystemExit(f"protoc failed with exit code {code}")
        source = pathlib.Path(out) / "weighbridge"
        # Hand-written modules in target are files; every folder is ours to replace.
        for old in target.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
        for generated in source.rglob("*.py*"):
            destination = target / generated.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            text = _IMPORT.sub(r"\1 weighbridge_proto.", generated.read_text())
            if generated.suffix == ".pyi":
                text = _QUALIFIED_NAME.sub("weighbridge_proto.", text)
            destination.write_text(text)
        for folder in [p for p in target.rglob("*") if p.is_dir()]:
            (folder / "__init__.py").touch()


if __name__ == "__main__":
    generate(pathlib.Path(__file__).resolve().parent)
