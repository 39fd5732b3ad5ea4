"""Model files from the Hugging Face hub, as a folder in its own cache. No torch."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from slipstream.errors import ModelError

# Weights as safetensors, settings and tokenizers; not the pickles, not other formats in subfolders, not a second copy of the weights.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_UNWANTED = ["*/*", "consolidated*"]
_ASK_TIMEOUT_S = 10.0


def hub_folder(name: str, revision: str | None) -> Path:
    """The local folder with the files of hub model `name`, downloaded where needed; without network, those already in the cache.

    ModelError for a model or revision that does not exist, that may not be read, or that is not cached when the hub is out of reach.
    """
    try:
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=_ASK_TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        at = f" at revision '{revision}'" if revision else ""
        reason = str(error).strip().splitlines()[-1]
        raise ModelError(f"model.name = '{name}': neither a folder here nor a model{at} on the Hugging Face hub ({reason})") from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code >= 500:
            return _cached(name, revision, error)
        raise ModelError(f"model.name = '{name}': the Hugging Face hub refuses it ({str(error).strip().splitlines()[0]})") from error
    except Exception as error:  # no network, by whatever name the HTTP library gives it
        return _cached(name, revision, error)
    return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))


def _cached(name: str, revision: str | None, cause: Exception) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, OSError):
        raise ModelError(
            f"model.name = '{name}': no folder of that name here, not in the Hugging Face cache, and the hub is out of reach "
            f"({type(cause).__name__}: {cause}). Give a folder, a GGUF file or 'builtin:tiny', or connect to the network once"
        ) from cause
