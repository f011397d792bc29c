"""Export a checkpoint as safetensors: ``trl-tpu export``."""

import argparse

# nothing heavy at the top: asking for help imports no torch

_DTYPES = ("float32", "bfloat16", "float16")


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
    return parser


def run(argv: list[str]) -> int:
    """Run the command ``trl-tpu export``; returns the exit status."""
    settings = vars(make_parser().parse_args(argv))
    import torch

    from trl_tpu.checkpoint.export import export_checkpoint

    dtype = settings.pop("dtype")
    export_checkpoint(**settings, dtype=None if dtype is None else getattr(torch, dtype))
    print(f"Model exported to {settings['out']}")
    return 0
