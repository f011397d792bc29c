"""Export a checkpoint as safetensors: ``trl-tpu export``."""

import argparse

# `run` imports torch, so that --help does not

_DTYPES = ("float32", "bfloat16", "float16")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="trl-tpu export",
        description="Write the model of a checkpoint to a new folder, in the format that from_pretrained reads.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="Folder or URL of a checkpoint, a saved model or saved adapters.")
    parser.add_argument("out", help="New folder to write to.")
    parser.add_argument("--merge", action="store_true", help="Merge the adapters into their base model.")
    parser.add_argument("--base", help="Folder or Hub id of the base model (default: the adapters name it).")
    parser.add_argument("--dtype", choices=_DTYPES, help="Type of the weights (default: the type in training).")
    parser.add_argument("--max_shard_size", default="5GB", help="Maximum size of a file of weights (default: 5GB).")
    parser.add_argument("--trust_remote_code", action="store_true", help="Let the model run its own code.")
    return parser


def run(argv: list[str]) -> int:
    """Run the command ``trl-tpu export``; return the exit status."""
    settings = vars(make_parser().parse_args(argv))
    import torch

    from trl_tpu.checkpoint.export import export_checkpoint

    dtype = settings.pop("dtype")
    export_checkpoint(**settings, dtype=None if dtype is None else getattr(torch, dtype))
    print(f"Model exported to {settings['out']}")
    return 0
