"""The HTTP of sd-server: paths, answers and headers; no health check, no progress, no way to stop a render."""

import base64
import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from services.engines.standins.sd.behaviour import Behaviour
from services.engines.standins.sd.command_line import CommandLine
from services.engines.standins.sd.jobs import MOST_PENDING, NO_RESULTS, Jobs
from services.engines.standins.sd.model import Model
from services.engines.standins.sd.parameters import (
    OUTPUT_FORMATS,
    SAMPLERS,
    SCHEDULERS,
    RefusedError,
    ServerError,
    defaults,
    from_job,
    from_openai,
    from_sdapi,
)
from services.engines.standins.sd.render import Renderer

_MODEL_SUFFIXES = (".gguf", ".safetensors", ".pt", ".pth")
_UPSCALERS = ("None", "Lanczos", "Nearest")
_LATENT_MODES = ("Latent", "Latent (nearest)", "Latent (nearest-exact)", "Latent (antialiased)", "Latent (bicubic)",
                 "Latent (bicubic antialiased)")  # fmt: skip

Answer = tuple[int, Any]
"""Status, and what is told as JSON."""


class App:
    """What is behind the paths."""

    def __init__(self, command_line: CommandLine, model: Model, behaviour: Behaviour) -> None:
        self._command_line = command_line
        self._model = model
        self._defaults = defaults(command_line)
        self._renderer = Renderer(command_line, model, behaviour)
        self._jobs = Jobs(self._renderer)

    def get(self, path: str) -> Answer | None:
        """None for a path that is not there."""
        stem = self._model.path.stem
        answers: dict[str, Callable[[], Any]] = {
            "/v1/models": lambda: {"data": [{"id": "sd-cpp-local", "object": "model", "owned_by": "local"}]},
            "/sdapi/v1/options": lambda: {"samples_format": "png", "sd_model_checkpoint": stem},
            "/sdapi/v1/sd-models": lambda: [
                {"title": stem, "model_name": stem, "filename": self._model.path.name, "hash": "8" * 10,
                 "sha256": "8" * 64, "config": None}
            ],
            "/sdapi/v1/samplers": lambda: [
                {"name": name, "aliases": [name], "options": {}} for name in ("default", *SAMPLERS)
            ],
            "/sdapi/v1/schedulers": lambda: [{"name": name, "label": name} for name in ("default", *SCHEDULERS)],
            "/sdapi/v1/loras": self._loras,
            "/sdapi/v1/upscalers": lambda: [
                {"name": name, "model_name": None, "model_path": None, "model_url": None, "scale": 4}
                for name in _UPSCALERS
            ],
            "/sdapi/v1/latent-upscale-modes": lambda: [{"name": name} for name in _LATENT_MODES],
            "/sdcpp/v1/capabilities": self._capabilities,
        }  # fmt: skip
        if path in answers:
            return 200, answers[path]()
        if path.startswith("/sdcpp/v1/jobs/"):
            told = self._jobs.told(path.rpartition("/")[2])
            return (404, {"error": "job not found"}) if told is None else (200, told)
        return None

    def post(self, path: str, body: bytes) -> Answer | None:
        """None for a path that is not there."""
        posts: dict[str, Callable[[bytes], Answer]] = {
            "/sdapi/v1/txt2img": lambda sent: self._sdapi(sent, from_image=False),
            "/sdapi/v1/img2img": lambda sent: self._sdapi(sent, from_image=True),
            "/v1/images/generations": self._openai,
            "/sdcpp/v1/img_gen": self._submit,
            "/sdcpp/v1/vid_gen": lambda sent: (
                400, {"error": "loaded model does not support vid_gen" if sent else "empty body"}
            ),
        }  # fmt: skip
        if path.startswith("/sdcpp/v1/jobs/") and path.endswith("/cancel"):
            return self._jobs.cancel(path.split("/")[4])
        if path not in posts:
            return None
        try:
            return posts[path](body)
        except RefusedError as refused:
            return 400, {"error": str(refused)}
        except ServerError as error:
            return 500, {"error": "server_error", "message": str(error)}

    def _sdapi(self, body: bytes, *, from_image: bool) -> Answer:
        loras = frozenset(entry["path"] for entry in self._loras())
        asked, sent = from_sdapi(body, self._defaults, from_image=from_image, loras=loras)
        pictures = self._renderer.render(asked)
        if not pictures:
            return 500, {"error": NO_RESULTS}
        return 200, {"images": [_encoded(picture) for picture in pictures], "parameters": sent, "info": ""}

    def _openai(self, body: bytes) -> Answer:
        asked = from_openai(body, self._defaults)
        pictures = self._renderer.render(asked)
        if not pictures:
            return 500, {"error": NO_RESULTS}
        data = [{"b64_json": _encoded(picture)} for picture in pictures]
        return 200, {"created": int(time.time()), "data": data, "output_format": asked.output_format}

    def _submit(self, body: bytes) -> Answer:
        if not body:
            raise RefusedError("empty body")
        told = self._jobs.submit(from_job(body, self._defaults))
        return (429, {"error": "job queue is full"}) if told is None else (202, told)

    def _loras(self) -> list[dict[str, str]]:
        folder = self._command_line.lora_folder
        found = (file for file in folder.rglob("*") if file.is_file() and file.suffix.lower() in _MODEL_SUFFIXES)
        return sorted(
            ({"name": file.stem, "path": file.relative_to(folder).as_posix()} for file in found),
            key=lambda entry: entry["path"],
        )

    def _capabilities(self) -> dict[str, Any]:
        base = self._defaults
        width, height = base.size
        img_gen = {
            "prompt": "", "negative_prompt": "", "width": width, "height": height, "strength": base.strength,
            "seed": base.seed, "batch_count": 1, "output_format": "png", "output_compression": 100,
            "sample_params": {"scheduler": "default", "sample_method": "default", "sample_steps": base.steps,
                              "guidance": {"txt_cfg": base.guidance, "distilled_guidance": 3.5}},
            "vae_tiling_params": {"enabled": base.tiling, "tile_size_x": 0, "tile_size_y": 0, "target_overlap": 0.5},
        }  # fmt: skip
        features = dict.fromkeys(
            ("init_image", "mask_image", "control_image", "ref_images", "lora", "vae_tiling", "hires", "cache",
             "cancel_queued"), True
        ) | {"cancel_generating": False}  # fmt: skip
        return {
            "model": {"name": self._model.path.name, "stem": self._model.path.stem, "path": str(self._model.path)},
            "current_mode": "img_gen",
            "supported_modes": ["img_gen"],
            "defaults": img_gen,
            "defaults_by_mode": {"img_gen": img_gen},
            "limits": {"min_width": 64, "max_width": 4096, "min_height": 64, "max_height": 4096, "max_batch_count": 8,
                       "max_queue_size": MOST_PENDING},
            "samplers": list(SAMPLERS),
            "schedulers": list(SCHEDULERS),
            "output_formats": list(OUTPUT_FORMATS),
            "output_formats_by_mode": {"img_gen": list(OUTPUT_FORMATS)},
            "features": features,
            "features_by_mode": {"img_gen": features},
            "loras": self._loras(),
            "upscalers": [{"name": name} for name in (*_UPSCALERS, *_LATENT_MODES)],
        }  # fmt: skip


class _Server(ThreadingHTTPServer):
    # As sd-server does: two of them on one port share its connections, and neither is told.
    allow_reuse_port = True
    daemon_threads = True


def serve(command_line: CommandLine, model: Model, behaviour: Behaviour) -> None:
    """Serve until killed. Returns at once where the address cannot be bound."""
    app = App(command_line, model, behaviour)
    handler = type("Handler", (_Handler,), {"app": app, "answers": behaviour.answers})
    try:
        server = _Server(command_line.address, handler)
    except OSError:
        return
    server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    app: App
    answers: bool
    protocol_version = "HTTP/1.1"
    timeout = 5  # seconds that a connection is kept for the next request

    def do_GET(self) -> None:  # the name is BaseHTTPRequestHandler's
        path = urlsplit(self.path).path
        if path == "/":
            self._send(200, b"Stable Diffusion Server is running", "text/html")
        else:
            self._answer(self.app.get(path))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(self.app.post(urlsplit(self.path).path, body))

    def do_OPTIONS(self) -> None:
        self._send(204, b"", "")

    def _answer(self, answer: Answer | None) -> None:
        if answer is None:
            self.close_connection = True
            self._send(404, b"", "")
        else:
            text = json.dumps(answer[1], sort_keys=True, separators=(",", ":"))
            self._send(answer[0], text.encode(), "application/json")

    def _send(self, status: int, body: bytes, media_type: str) -> None:
        while not self.answers:
            time.sleep(3600)
        self.send_response_only(status)
        if self.close_connection:
            self.send_header("Connection", "close")
        else:
            self.send_header("Keep-Alive", "timeout=5, max=100")
        if media_type:
            self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Access-Control-Allow-Origin", self.headers.get("Origin") or "*")
        for name, value in (("Credentials", "true"), ("Methods", "*"), ("Headers", "*")):
            self.send_header(f"Access-Control-Allow-{name}", value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """It prints nothing of requests."""


def _encoded(picture: bytes) -> str:
    return base64.b64encode(picture).decode()
