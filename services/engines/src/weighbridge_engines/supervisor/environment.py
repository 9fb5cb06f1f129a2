"""The environment of an engine: a few named variables, nothing else of the service's."""

import os
from collections.abc import Iterable, Mapping

ALLOWED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "SSL_CERT_FILE", "LD_LIBRARY_PATH",
     "DYLD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
     "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
)  # fmt: skip
"""Where programs and libraries lie, how text is written, and which devices may be seen. Everything else (tokens,
preloads, another engine's switches such as DS4_*) stays behind."""

ALLOWED_PREFIXES = ("LC_",)


def scrub(
    environ: Mapping[str, str] | None = None,
    *,
    also: Iterable[str] = (),
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """What of ``environ`` (default: the process's own) an engine may see.

    Args:
        also: further names to pass on.
        extra: variables set on top.
    """
    source = os.environ if environ is None else environ
    allowed = ALLOWED | set(also)
    kept = {name: value for name, value in source.items() if name in allowed or name.startswith(ALLOWED_PREFIXES)}
    return {**kept, **(extra or {})}
