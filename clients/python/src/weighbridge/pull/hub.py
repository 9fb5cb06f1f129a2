"""The files of a Hugging Face repository, through the hub's own library: it knows the hub's storage and its accounts.

What it brings is verified here all the same, since it checks sizes alone.
"""

import errno
import importlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from weighbridge.pull.addresses import Route
from weighbridge.pull.errors import PullError, PullReason, PullStoppedError, refused_by_disk
from weighbridge.pull.part import sync_folder
from weighbridge.pull.transfer import ATTEMPTS, LONGEST_WAIT_S, PROGRESS_BYTES, Watcher
from weighbridge.pull.wanted import WantedFile, checked

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w.-]{1,128}", re.ASCII)
HUB_NAME = "hub"
"""What the library keeps, within the work in progress."""
MAX_OFFERED = 10_000
"""Files of a repository, most of which may not be wanted."""
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.EXDEV})


class Repository(Protocol):
    """A repository that files come from."""

    def files(self) -> tuple[str, list[WantedFile]]:
        """Its revision and all its files, with sizes and digests. Raises PullError."""

    def bring(self, file: WantedFile, target: Path, watcher: Watcher) -> None:
        """Downloads one of them. Raises PullError, PullStoppedError."""


class HubRepository:
    """One repository at one revision ("": its newest), on the hub or a mirror of it.

    `work` is a folder on the same file system as the target, where the library keeps what has come so far; `stall_s` is
    how long the hub may say nothing; `sleep` waits for so many seconds, and may raise PullStoppedError.
    """

    def __init__(
        self,
        name: str,
        revision: str,
        route: Route,
        work: Path,
        *,
        stall_s: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not _REPOSITORY.fullmatch(name) or (revision and not _REVISION.fullmatch(revision)):
            raise PullError(PullReason.BAD_ENTRY, f"{name[:200]!r} at {revision[:200]!r} is no repository.")
        # Read when the library is imported.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", f"{max(1, round(stall_s))}")
        try:
            import huggingface_hub
        except ImportError as error:
            message = "Repositories need huggingface_hub. Install it: pip install 'weighbridge[pull]'."
            raise PullError(PullReason.NOT_INSTALLED, message) from error
        self._library: Any = huggingface_hub
        self._name, self._revision = name, revision
        self._endpoint = route.hub.rstrip("/")
        # False, and not None: None would make it look for a token of its own.
        self._token: str | bool = route.token if route.headers(self._endpoint + "/") else False
        self._work = work / HUB_NAME
        self._stall_s = stall_s
        self._sleep = sleep

    def files(self) -> tuple[str, list[WantedFile]]:
        """See Repository."""
        api = self._library.HfApi(endpoint=self._endpoint, token=self._token)
        info = self._asking(
            lambda: api.model_info(
                self._name, revision=self._revision or None, files_metadata=True, timeout=self._stall_s
            )
        )
        self._revision = info.sha or self._revision
        siblings = info.siblings or []
        if len(siblings) > MAX_OFFERED:
            raise PullError(PullReason.BAD_ENTRY, f"{self._name} has more than {MAX_OFFERED:,} files.")
        files = []
        for sibling in siblings:
            if re.match(r"\.[^./]", sibling.rfilename):
                continue  # what a repository keeps for itself
            if not isinstance(sibling.size, int):
                message = f"{self._name} does not say how large {sibling.rfilename[:200]!r} is."
                raise PullError(PullReason.SIZE_MISMATCH, message)
            large = sibling.lfs
            files.append(
                checked(
                    WantedFile(
                        sibling.rfilename,
                        sibling.size,
                        sha256=large.sha256 if large else "",
                        git_sha1="" if large else sibling.blob_id or "",
                    )
                )
            )
        return self._revision, files

    def bring(self, file: WantedFile, target: Path, watcher: Watcher) -> None:
        """See Repository."""
        try:
            downloaded = self._download(file, watcher)
            if downloaded.stat().st_size != file.size_bytes or not watcher.verify(downloaded, file):
                downloaded.unlink()
                message = f"{file.path} came whole, and is not what its repository describes. It was thrown away."
                raise PullError(PullReason.DIGEST_MISMATCH, message)
            target.parent.mkdir(parents=True, exist_ok=True)
            with downloaded.open("rb") as opened:
                os.fsync(opened.fileno())
            downloaded.replace(target)
            sync_folder(target.parent)
        except BrokenPipeError:
            raise  # whoever listened to the progress has gone: not the disk's doing
        except OSError as error:
            raise refused_by_disk(error, file.path) from error

    def _download(self, file: WantedFile, watcher: Watcher) -> Path:
        """The file as the library brought it, in its own folder. The library goes on where it was cut off."""
        failures, furthest, reached = 0, 0, 0

        def hear(count: int) -> None:
            nonlocal reached
            reached = max(reached, count)
            watcher.on_bytes(count)

        heard = Watcher(hear, watcher.on_note, watcher.stopped)
        watcher.on_bytes(0)
        while True:
            try:
                downloaded = self._asking(
                    lambda: self._library.hf_hub_download(
                        self._name,
                        file.path,
                        revision=self._revision or None,
                        local_dir=self._work,
                        endpoint=self._endpoint,
                        token=self._token,
                        etag_timeout=self._stall_s,
                        tqdm_class=_reporting(heard),
                    )
                )
            except PullError as error:
                if error.reason is not PullReason.UNREACHABLE:
                    raise
                failures, furthest = (0, reached) if reached - furthest >= PROGRESS_BYTES else (failures + 1, furthest)
                if failures >= ATTEMPTS:
                    message = f"{file.path}: {error.message} {failures} times in a row: the same command goes on."
                    raise PullError(PullReason.UNREACHABLE, message) from error
                pause = min(LONGEST_WAIT_S, 2.0**failures)
                watcher.on_note(f"{file.path}: {error.message} Trying again in {pause:.0f} s.")
                self._sleep(pause)
            else:
                watcher.on_bytes(file.size_bytes)
                return Path(downloaded)

    def _asking(self, ask: Callable[[], Any]) -> Any:
        """What `ask` answers, with the library's many exceptions as ours."""
        errors = self._library.errors
        try:
            return ask()
        except (PullError, PullStoppedError, BrokenPipeError):
            raise
        except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
            raise self._not_shown() from error
        # A kind of "not found" that means the network: nothing was found out.
        except errors.LocalEntryNotFoundError as error:
            raise self._unreachable(error) from error
        except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
            message = f"{self._name} has no longer what the catalogue names (revision {self._revision or 'newest'})."
            raise PullError(PullReason.NOT_THERE, message) from error
        # The library promises no exceptions of its own for what breaks below it.
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK:
                raise refused_by_disk(error, self._name) from error
            if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403):
                raise self._not_shown() from error
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> PullError:
        message = f"{self._name}: the hub cannot be reached, or breaks off ({type(error).__name__})."
        return PullError(PullReason.UNREACHABLE, message)

    def _not_shown(self) -> PullError:
        return PullError(
            PullReason.NOT_ALLOWED,
            f"The hub does not show {self._name}: it does not exist, or wants a token or its licence accepted. "
            "Accept it on the model's page and set WEIGHBRIDGE_PULL_TOKEN.",
        )


def _reporting(watcher: Watcher) -> type[Any]:
    """The library's progress bar, as our watcher: it hears of bytes, and stops the library by an exception."""
    bar: Any = importlib.import_module("tqdm").tqdm  # the library's own dependency

    class Reporting(bar):  # type: ignore[misc] # a class that is known at run time alone
        def __init__(self, *args: Any, **settings: Any) -> None:
            settings.pop("name", None)
            super().__init__(*args, **{**settings, "disable": True})
            self._seen = int(settings.get("initial") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            if watcher.stopped():
                raise PullStoppedError
            self._seen += int(n or 0)
            watcher.on_bytes(self._seen)
            return None

    return Reporting
