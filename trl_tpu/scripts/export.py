"""Export a checkpoint as safetensors, and push it to a hub: ``trl-tpu export``."""

import argparse
import re
from pathlib import Path

from trl_tpu.errors import UserError

# nothing heavy at the top: asking for help imports no torch

_DTYPES = ("float32", "bfloat16", "float16")
# what loading would prefer to a model's files, or mix with them, beside each other at the top of a repository
_OF_A_MODEL = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|adapter_config\.json"
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's words."""
    parser = argparse.ArgumentParser(
        prog="trl-tpu export",
        description="Write the model in a checkpoint to a new folder, as from_pretrained reads it.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="Folder or URL of a checkpoint, of a saved model or of saved adapters.")
    parser.add_argument("out", help="New folder.")
    parser.add_argument("--merge", action="store_true", help="Merge the adapters into their base model.")
    parser.add_argument("--base", help="Folder or Hub id of the base model, if not the one that the adapters name.")
    parser.add_argument("--dtype", choices=_DTYPES, help="Of the weights; as they were trained by default.")
    parser.add_argument("--max_shard_size", default="5GB", help="Of one file of weights (default: 5GB).")
    parser.add_argument("--trust_remote_code", action="store_true", help="Let the model bring its own code.")
    parser.add_argument("--push_to_hub", metavar="REPO", help="Upload the folder to this repository of the Hub.")
    parser.add_argument("--private", action="store_true", help="Make the repository private, if it is new.")
    return parser


def run(argv: list[str]) -> int:
    """Run the command ``trl-tpu export``: export, and push if asked to; returns the exit status.

    Raises:
        UserError: See `export_checkpoint`; or the push failed, and the export is whole.
    """
    settings = vars(make_parser().parse_args(argv))
    import torch

    from trl_tpu.checkpoint.consolidate import export_checkpoint

    checkpoint, out, repo, private = (settings.pop(name) for name in ("checkpoint", "out", "push_to_hub", "private"))
    dtype = settings.pop("dtype")
    export_checkpoint(checkpoint, out, dtype=None if dtype is None else getattr(torch, dtype), **settings)
    print(f"Model exported to {out}")
    if repo is not None:
        print(f"Pushed to {push(Path(out), repo, private=private)}")
    return 0


def push(folder: Path, repo: str, private: bool = False) -> str:
    """Upload an export in one commit, with a model card; an earlier model in its place goes in the same commit.

    Returns:
        The address of the commit.

    Raises:
        UserError: The Hub refused, and shows nothing of it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # of the library it makes requests with: no connection, say

    write_card(folder, repo)
    api, earlier = HfApi(), []
    try:
        name = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
        earlier = [file for file in api.list_repo_files(name) if _OF_A_MODEL.fullmatch(file)]
        message = "Upload reward model"
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=earlier)
    except (HTTPError, OSError) as error:
        flags = " --private" * private + "".join(f" --delete {file}" for file in earlier)
        raise UserError(
            f"Pushing to {repo} FAILED: {error}\nIt is one commit, so no part of the model is visible there. The "
            f"export in {folder} is whole. Push it again: hf upload {repo} {folder}{flags}"
        ) from error
    return commit.commit_url


def write_card(folder: Path, repo: str) -> None:
    """Write the model card, README.md, where there is none."""
    from importlib.metadata import version

    from trl_tpu.checkpoint.model_folder import ADAPTER_CONFIG, read_config
    from trl_tpu.modeling.engines import saved_scale
    from trl_tpu.modeling.load import load_tokenizer
    from trl_tpu.report.model_card import Reading, make_model_card

    if (folder / "README.md").exists():
        return
    adapters = folder / ADAPTER_CONFIG
    base = read_config(adapters).get("base_model_name_or_path") if adapters.exists() else None
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(str(folder)) if has_tokenizer else None
    card = make_model_card(
        repo.rpartition("/")[2],
        location=repo,
        base_model=base if isinstance(base, str) and base and not Path(base).exists() else None,
        dataset_name=None,
        tags=["reward-trainer", "trl"],
        versions={library: version(library) for library in ("torch", "transformers")},
        reading=Reading(tokenizer, scale=saved_scale(folder)),
    )
    card.save(folder / "README.md")
