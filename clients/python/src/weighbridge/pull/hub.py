"""The files of a Hugging Face repository, through the hub's own library: it knows the hub's storage and its accounts.

What it brings is verified here all the same, since it checks sizes alone.
"""

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from weighbridge.pull.addresses import Route
from weighbridge.pull.errors import PullError, PullReason, PullStoppedError
from weighbridge.pull.transfer import Watcher, sync_folder
from weighbridge.pull.wanted import WantedFile, checked, digest_of

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w.-]{1,128}", re.ASCII)
MAX_FILES = 10_000


class Repository(Protocol):
    """A repository that files come from."""

    def files(self) -> tuple[str, list[WantedFile]]:
        """Its revision and all its files, with sizes and digests. Raises PullError."""

    def bring(self, file: WantedFile, target: Path, watcher: Watcher) -> None:
        """Downloads one of them. Raises PullError, PullStoppedError."""


class HubRepository:
    """One repository at one revision ("": its newest), on the hub or a mirror of it.

    `work` is a folder on the same file system as the target, where the library keeps what has come so far.
    """

    def __init__(self, name: str, revision: str, route: Route, work: Path) -> None:
        if not _REPOSITORY.fullmatch(name) or (revision and not _REVISION.fullmatch(revision)):
            raise PullError(PullReason.BAD_ENTRY, f"{name[:200]!r} at {revision[:200]!r} is no repository.")
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when the library is imported
        try:
            import huggingface_hub
        except ImportError as error:
            message = "Repositories need huggingface_hub. Install it: pip install 'weighbridge[pull]'."
            raise PullError(PullReason.NOT_INSTALLED, message) from error
        self._library: Any = huggingface_hub
        self._name, self._revision = name, revision
        self._endpoint = route.hub.rstrip("/")
        # False, and not None: None would make it look for a token of its own.
        self._token: str | bool = route.token or False
        self._work = work / "hub"

    def files(self) -> tuple[str, list[WantedFile]]:
        """See Repository."""
        api = self._library.HfApi(endpoint=self._endpoint, token=self._token)
        info = self._asking(lambda: api.model_info(self._name, revision=self._revision or None, files_metadata=True))
        self._revision = info.sha or self._revision
        siblings = info.siblings or []
        if len(siblings) > MAX_FILES:
            raise PullError(PullReason.BAD_ENTRY, f"{self._name} has more than {MAX_FILES:,} files.")
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
        watcher.on_bytes(0)
        downloaded = Path(
            self._asking(
                lambda: self._library.hf_hub_download(
                    self._name,
                    file.path,
                    revision=self._revision or None,
                    local_dir=self._work,
                    endpoint=self._endpoint,
                    token=self._token,
                    tqdm_class=_reporting(watcher),
                )
            )
        )
        if downloaded.stat().st_size != file.size_bytes or not file.is_right(digest_of(downloaded, file)):
            downloaded.unlink()
            message = f"{file.path} came whole, and is not what its repository describes. It was thrown away."
            raise PullError(PullReason.DIGEST_MISMATCH, message)
        target.parent.mkdir(parents=True, exist_ok=True)
        with downloaded.open("rb") as opened:
            os.fsync(opened.fileno())
        downloaded.replace(target)
        sync_folder(target.parent)
        watcher.on_bytes(file.size_bytes)

    def _asking(self, ask: Callable[[], Any]) -> Any:
        """What `ask` answers, with the library's many exceptions as ours."""
        errors = self._library.errors
        try:
            return ask()
        except PullStoppedError:
            raise
        except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
            raise self._not_shown() from error
        except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
            message = f"{self._name} has no longer what the catalogue names (revision {self._revision or 'newest'})."
            raise PullError(PullReason.NOT_THERE, message) from error
        # The library promises no exceptions of its own for what breaks below it.
        except Exception as error:
            if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403):
                raise self._not_shown() from error
            message = f"{self._name}: the hub cannot be reached ({type(error).__name__}). The same command goes on."
            raise PullError(PullReason.UNREACHABLE, message) from error

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
