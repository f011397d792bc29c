"""Export a checkpoint as safetensors, and push it to a hub: ``trl-tpu export``."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from trl_tpu.errors import UserError

# nothing heavy at the top: asking for help imports no torch

_DTYPES = ("float32", "bfloat16", "float16")
# what loading would prefer to a model's files, or mix with them, beside each other at the top of a repository
_OF_A_MODEL = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|adapter_config\.json"
)
_STATE_OF_TRAINING = ("state", "trainer_state.json", "optimizer.pt", "manifest.json")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's words."""
    parser = argparse.ArgumentParser(
        prog="trl-tpu export",
        description="Write the model in a checkpoint to a new folder, as from_pretrained reads it.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="Folder or URL of a checkpoint, of a saved model or of saved adapters.")
    parser.add_argument(
        "out", nargs="?", help="New folder; left out, the folder CHECKPOINT, an earlier export, is pushed as it is."
    )
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
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.out is None and args.push_to_hub is None:
        parser.error("give OUT, the new folder, or --push_to_hub REPO to push an earlier export")
    if args.push_to_hub is None and args.private:
        parser.error("--private is of the repository that --push_to_hub REPO names")
    names = ("merge", "base", "dtype", "max_shard_size", "trust_remote_code")
    how: dict[str, Any] = {name: getattr(args, name) for name in names}
    if args.out is None and (unused := [name for name in names if how[name] != parser.get_default(name)]):
        parser.error(f"--{unused[0]} is for an export: give OUT, since CHECKPOINT is pushed as it is")
    if args.out is not None:
        import torch

        from trl_tpu.checkpoint.consolidate import export_checkpoint

        how["dtype"] = None if args.dtype is None else getattr(torch, args.dtype)
        export_checkpoint(args.checkpoint, args.out, **how)
        print(f"Model exported to {args.out}")
    if args.push_to_hub is not None:
        url = push(Path(args.out or args.checkpoint), args.push_to_hub, private=args.private)
        print(f"Pushed to {url}")
    return 0


def push(folder: Path, repo: str, private: bool = False) -> str:
    """Upload an export in one commit, with a model card; an earlier model in its place goes in the same commit.

    Returns:
        The address of the commit.

    Raises:
        UserError: The folder is a checkpoint of training, no model, or has links; or the hub refused, and shows
            nothing of it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # of the library it makes requests with: no connection, say

    if found := [name for name in _STATE_OF_TRAINING if (folder / name).exists()]:
        raise UserError(
            f"{folder} is a checkpoint of training (it has {', '.join(found)}). Export it first: give OUT."
        )
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no weights in safetensors, so there is nothing to push.")
    if links := sorted(path for path in folder.rglob("*") if path.is_symlink()):
        raise UserError(f"{links[0]} is a link, and what it leads to would be uploaded. Put a copy in its place.")
    write_card(folder, repo)
    api = HfApi()
    try:
        name = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
        earlier = [file for file in api.list_repo_files(name) if _OF_A_MODEL.fullmatch(file)]
        told = "Upload reward model"
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message=told, delete_patterns=earlier)
    except (HTTPError, OSError) as error:
        raise UserError(
            f"Pushing to {repo} FAILED: {error}\nIt is one commit, so no part of the model is visible there. The "
            f"export in {folder} is whole. Push it again: trl-tpu export {folder} --push_to_hub {repo}"
        ) from error
    return commit.commit_url


def write_card(folder: Path, repo: str) -> None:
    """Write the model card, README.md, where there is none."""
    from importlib.metadata import version

    from trl_tpu.checkpoint.model_folder import ADAPTER_CONFIG, read_config
    from trl_tpu.modeling.load import load_tokenizer
    from trl_tpu.modeling.readers import saved_scale
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


if __name__ == "__main__":
    from trl_tpu.cli import main as command

    raise SystemExit(command(["export", *sys.argv[1:]]))
