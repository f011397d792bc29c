"""Compare the rewards of vLLM with those of ``trl-tpu score``, on the same rows.

    trl-tpu score --model_name_or_path MODEL --dataset_name ROWS.jsonl --output SCORED.jsonl
    python examples/score_with_vllm.py MODEL SCORED.jsonl      # in an environment that has vLLM

MODEL is a saved reward model or a merged export; rows have `messages` or `text`, and the `reward` of `trl-tpu score`.
vLLM returns the model's only output unchanged, because the config says ``problem_type: regression``.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from vllm import LLM


def token_ids(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    """Tokenize a row as training did: messages by the template, a text with the EOS at its end.

    Where padding is the EOS, training scored the token before it; vLLM scores the very last one, so the EOS stays off.
    """
    if "messages" in row:
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
    else:
        ids = tokenizer(row["text"] + (tokenizer.eos_token or ""))["input_ids"]
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        while ids[-1] == tokenizer.eos_token_id:
            ids.pop()
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("scored", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="With dtype float32; bfloat16 is coarser.")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.scored.read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    llm = LLM(args.model, runner="pooling", dtype=args.dtype, enforce_eager=True)
    answers = llm.classify([{"prompt_token_ids": token_ids(tokenizer, row)} for row in rows])
    rewards = [answer.outputs.probs[0] for answer in answers]
    differences = [abs(reward - row["reward"]) for reward, row in zip(rewards, rows, strict=True)]
    print(f"{len(rows)} rewards, the largest difference is {max(differences):.2e}")
    if max(differences) > args.tolerance:
        raise SystemExit(f"more than {args.tolerance:g}: are these the rewards of this model?")


if __name__ == "__main__":
    main()
