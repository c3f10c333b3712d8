"""The hub loader: fetch (or find in the cache) with huggingface_hub, then read locally.

Offline operation is the library's own: `HF_HUB_OFFLINE=1` uses the cache alone. Tokens, mirrors
and cache folders are its business too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cardcage.core.contracts import ModelSource
from cardcage.core.errors import ModelError
from cardcage.plugins.loaders.gguf.source import open_gguf
from cardcage.plugins.loaders.hub import REF
from cardcage.plugins.loaders.safetensors.source import open_folder

Progress = Callable[[str, int, int], None]
WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
# Second copies of the weights in other layouts, which many repositories carry.
IGNORED = ["original/*", "consolidated*", "onnx/*", "*/consolidated*"]


class HubLoader:
    """Opens hub repositories."""

    def open(self, ref: str, progress: Progress | None = None) -> ModelSource:
        """The repository (or one GGUF file of it), fetched where it is not cached.

        Raises:
            ModelError: huggingface_hub is not installed, or the repository cannot be had.
        """
        match = REF.fullmatch(ref)
        if match is None:
            raise ModelError(f"{ref!r} is no hub reference; its form is org/name[@revision]")
        try:
            import huggingface_hub as hub
        except ImportError as error:
            raise ModelError(
                f"{ref} names a hub model, and huggingface_hub is not installed; run "
                "pip install 'cardcage[hub]', or give the path of a local folder"
            ) from error
        repo, revision, file = match["repo"], match["revision"], match["file"]
        bars = _bars(f"download {repo}", progress)
        try:
            if file:
                path = hub.hf_hub_download(repo, file, revision=revision, **bars)
                return open_gguf(Path(path), ref)
            folder = hub.snapshot_download(
                repo, revision=revision, allow_patterns=WANTED, ignore_patterns=IGNORED, **bars
            )
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(_explain(ref, error)) from error
        if not (Path(folder) / "config.json").is_file():
            raise ModelError(
                f"{ref}: the repository has no config.json; if it holds GGUF files, name one as "
                f"{repo}:file.gguf"
            )
        return open_folder(Path(folder), ref, name=repo)


def _explain(ref: str, error: Exception) -> str:
    """One sentence for what the library raised: its own first line, and what to do."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return f"{ref}: the repository is gated; accept its terms and log in with `hf auth login`"
    if "RevisionNotFoundError" in kinds:
        return f"{ref}: the hub has the repository but not this revision"
    if "RepositoryNotFoundError" in kinds:
        return f"{ref}: the hub has no such repository, or it is private; check the name or log in"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"}:
        return (
            f"{ref}: not in the local cache, and the hub cannot be reached (offline?); fetch it "
            "once with a network, or give the path of a local folder"
        )
    if "EntryNotFoundError" in kinds:
        return f"{ref}: the repository has no such file"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"{ref}: cannot be fetched from the hub ({first[:300]})"


def _bars(what: str, progress: Progress | None) -> dict[str, Any]:
    """The library's progress bars, turned into calls of `progress`."""
    if progress is None:
        return {}
    report = progress
    from tqdm.auto import tqdm

    class Silent(tqdm):  # type: ignore[type-arg,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # a grouping that only the library's own bars know
            self.bytes_bar = kwargs.get("unit") == "B"
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)
            self.count = int(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            if self.bytes_bar:
                self.count += int(n or 0)
                report(what, self.count, int(self.total or 0))

    return {"tqdm_class": Silent}
