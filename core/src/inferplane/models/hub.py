"""Fetches models from the Hugging Face hub into its own cache, by its own library."""

from __future__ import annotations

from pathlib import Path

from inferplane.models.errors import ModelLoadError

# Configuration, tokenizer and safetensors: never a pickle, and no code
_WANTED = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
# Copies of the weights in other layouts, which some repositories carry along
_UNWANTED = ["original/*", "consolidated*", "onnx/*", "openvino/*", "metal/*", "*.index.fp32.json"]


def snapshot(model: str, *, revision: str | None, cache_dir: str | Path | None, progress: bool) -> Path:
    """The folder of a model, fetched where the cache lacks it. ``HF_HUB_OFFLINE`` and the like are respected.

    Raises `ModelLoadError` that tells a model that does not exist from one that cannot be reached.
    """
    # half a second to import
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import tqdm as hub_tqdm

    class NoBar(hub_tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    shown = model if revision is None else f"{model} (revision {revision})"
    try:
        path = snapshot_download(
            model,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            tqdm_class=None if progress else NoBar,
        )
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"model {shown}: its makers ask for consent first; give it on the model's page and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"model {shown}: there is no such folder, and no such model on the hub (or it is private: set HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"model {shown}: the model has no such revision") from error
    except errors.HFValidationError as error:
        raise ModelLoadError(f"model {shown}: is neither a folder nor a possible hub id ({error})") from error
    # the hub's library lets errors of whichever HTTP client it uses through; all mean that it cannot be reached
    except Exception as error:
        raise ModelLoadError(
            f"model {shown}: there is no such folder, the cache of the hub does not hold it, and it cannot be fetched "
            f"({_first_line(error)}); give a folder or a GGUF file, or fetch it where there is a connection"
        ) from error
    return Path(path)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
