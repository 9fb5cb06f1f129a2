"""The one thread that touches MLX."""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Cancellation:
    """A flag that the loop raises and the owner thread looks at between steps."""

    __slots__ = ("requested",)

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        """Asks the job to end at its next step. Never waits."""
        self.requested = True


class OwnerThread:
    """Runs jobs one after another, in the order they came, on a thread of its own.

    MLX ties streams, lazily loaded weights and random state to the thread that made them, and a thread that used MLX
    and ends without clearing its streams can abort the process at exit. So one thread does all of it: it starts with
    set_up, runs jobs, and ends with tear_down.

    A job handles its own errors. One that lets an exception escape is a defect that leaves the model in an unknown
    state: the thread tears down, ends, and on_fatal is called with the exception (from this thread).
    """

    def __init__(self, *, set_up: Job, tear_down: Job, on_fatal: Callable[[BaseException], None]) -> None:
        self._set_up = set_up
        self._tear_down = tear_down
        self._on_fatal = on_fatal
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mlx-owner")

    def start(self) -> None:
        """Starts the thread; set_up runs on it before the first job."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job. Never waits."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Lets the queued jobs finish, tears down and waits for the thread's end. Cancel the jobs first to be quick."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            try:
                self._set_up()
                while (job := self._jobs.get()) is not None:
                    job()
                    del job  # a finished job must not keep its arrays alive while the thread waits for the next
            finally:
                self._tear_down()
        except BaseException as error:
            self._on_fatal(error)
