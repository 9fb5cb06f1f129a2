"""The job API: one worker, renders in order, a running one cannot be interrupted."""

import base64
import collections
import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from services.engines.standins.sd.parameters import Parameters, ServerError
from services.engines.standins.sd.render import Renderer

MOST_PENDING = 64
NO_RESULTS = "generate_image returned no results"


@dataclass
class Job:
    """One job, as it is told."""

    id: str
    asked: Parameters
    status: str = "queued"
    created: int = field(default_factory=lambda: int(time.time()))
    started: int | None = None
    completed: int | None = None
    images: list[bytes] = field(default_factory=list)
    error: dict[str, str] | None = None


class Jobs:
    """All jobs, and the worker that renders them."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._jobs: dict[str, Job] = {}
        self._queue: collections.deque[Job] = collections.deque()
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, asked: Parameters) -> dict[str, Any] | None:
        """What is told of the new job; None where too many are pending."""
        with self._changed:
            if sum(job.status in ("queued", "generating") for job in self._jobs.values()) >= MOST_PENDING:
                return None
            job = Job(f"job_{int(time.time()):x}_{next(self._numbers):08d}", asked)
            self._jobs[job.id] = job
            self._queue.append(job)
            self._changed.notify()
            return {"id": job.id, "kind": "img_gen", "status": job.status, "created": job.created,
                    "poll_url": f"/sdcpp/v1/jobs/{job.id}"}  # fmt: skip

    def told(self, job_id: str) -> dict[str, Any] | None:
        """What a job is at; None for one that never was."""
        with self._changed:
            job = self._jobs.get(job_id)
            return None if job is None else self._tell(job)

    def cancel(self, job_id: str) -> tuple[int, dict[str, Any]]:
        """Status and answer."""
        with self._changed:
            job = self._jobs.get(job_id)
            if job is None:
                return 404, {"error": "job not found"}
            if job.status == "generating":
                return 409, {"error": "job is currently generating and cannot be interrupted yet"}
            if job.status == "queued":
                self._queue.remove(job)
                job.status, job.completed = "cancelled", int(time.time())
                job.error = {"code": "cancelled", "message": "job cancelled by client"}
            return 200, self._tell(job)

    def _tell(self, job: Job) -> dict[str, Any]:
        result = None
        if job.status == "completed":
            images = [
                {"index": index, "b64_json": base64.b64encode(image).decode()} for index, image in enumerate(job.images)
            ]
            result = {"output_format": job.asked.output_format, "images": images}
        position = self._queue.index(job) + 1 if job in self._queue else 0
        return {
            "id": job.id, "kind": "img_gen", "status": job.status, "created": job.created, "started": job.started,
            "completed": job.completed, "queue_position": position, "result": result, "error": job.error,
        }  # fmt: skip

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                job = self._queue.popleft()
                job.status, job.started = "generating", int(time.time())
            try:
                images = self._renderer.render(job.asked)
            except ServerError:
                images = []
            with self._changed:
                job.images, job.completed = images, int(time.time())
                job.status = "completed" if images else "failed"
                if not images:
                    job.error = {"code": "generation_failed", "message": NO_RESULTS}
