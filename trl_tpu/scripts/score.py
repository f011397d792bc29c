"""Score texts, conversations or pairs with a saved reward model, in plain torch: ``trl-tpu score``."""

import sys

if __name__ == "__main__":  # the command exports the `env` of its YAML file before the imports below read it
    from trl_tpu.cli import main as command

    raise SystemExit(command(["score", *sys.argv[1:]]))

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from transformers.utils import find_adapter_config_file

from trl_tpu.data.checks import rendering
from trl_tpu.data.tokenize import prepare_preference_dataset
from trl_tpu.errors import UserError
from trl_tpu.modeling.adapters import load_adapted_model
from trl_tpu.modeling.broken import explaining
from trl_tpu.modeling.load import load_tokenizer
from trl_tpu.scripts import datafiles
from trl_tpu.scripts.parser import TrlParser
from trl_tpu.trainer.field_help import help_from_docstring

logger = logging.getLogger(__name__)

Dialogue = str | list[dict[str, Any]]


@help_from_docstring
@dataclass
class ScoreArguments:
    """What to score, and with which model.

    Args:
        model_name_or_path: Folder (or Hub id) of a saved reward model or of its adapters.
        text: Texts to score; the flag may be repeated.
        dataset_name: Rows to score: a local file, a folder, a Hub id. Columns ``text``, ``messages``, or pairs in
            ``chosen`` and ``rejected`` (``prompt`` too where it is explicit).
        dataset_config: Configuration of the dataset.
        dataset_split: Split to score; may be left out where there is only one.
        output: JSON Lines file for the rows with their rewards.
        batch_size: Dialogues per forward pass.
        max_length: Dialogues of more tokens get no reward, as training leaves them out; no limit when None.
        trust_remote_code: Whether the model may bring its own code.
    """

    model_name_or_path: str
    text: list[str] | None = field(default=None, metadata={"action": "extend"})
    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_split: str | None = None
    output: str | None = None
    batch_size: int = 8
    max_length: int | None = None
    trust_remote_code: bool = False


class Scorer:
    """A saved reward model and its tokenizer, in float32 on CUDA where there is one, else on the CPU.

    Args:
        model_folder: Folder (or Hub id) of a saved reward model, or of adapters, which name their base model.
        trust_remote_code: Whether the model may bring its own code.
    """

    def __init__(self, model_folder: str, trust_remote_code: bool = False) -> None:
        self.tokenizer: Any = load_tokenizer(model_folder, trust_remote_code=trust_remote_code)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = _load(model_folder, trust_remote_code).to(self.device).eval()
        text_config = self.model.config.get_text_config()
        if text_config.pad_token_id is None:  # the base model of adapters need not have one
            text_config.pad_token_id = self.tokenizer.pad_token_id
        if text_config.pad_token_id is None:
            raise UserError(
                f"Neither the config nor the tokenizer of {model_folder} has a pad token, by which a reward model "
                "finds the last token of a dialogue. Set the tokenizer's `pad_token` as in training and save it there."
            )
        self.pad_token_id: int = text_config.pad_token_id

    def token_ids(self, dialogue: Dialogue) -> list[int]:
        """Tokenize a dialogue as training does: text ends with the EOS, messages go through the template."""
        if isinstance(dialogue, str):
            eos = self.tokenizer.eos_token or ""
            return self.tokenizer(text=dialogue if dialogue.endswith(eos) else dialogue + eos)["input_ids"]
        if self.tokenizer.chat_template is None:
            raise UserError("This model's tokenizer has no chat template, so it scores text, not messages.")
        with rendering(f"A conversation, {dialogue!r:.80},", "Correct it, or the tokenizer's `chat_template`"):
            return self.tokenizer.apply_chat_template(dialogue, tokenize=True, return_dict=True)["input_ids"]

    def rewards(self, ids: list[list[int]], batch_size: int = 8, max_length: int | None = None) -> list[float]:
        """Compute rewards of tokenized dialogues, in order; nan for one of more than `max_length` tokens.

        Raises:
            UserError: A dialogue without tokens, or a batch size below 1.
        """
        if batch_size < 1:
            raise UserError(f"`batch_size` must be 1 or more, not {batch_size}.")
        if empty := [index for index, tokens in enumerate(ids) if not tokens]:
            raise UserError(f"Dialogues without tokens have no reward; these have none: {empty[:10]}.")
        rewards = [math.nan] * len(ids)
        limit = math.inf if max_length is None else max_length
        # batches of like lengths waste least on padding
        fitting = sorted((i for i, tokens in enumerate(ids) if len(tokens) <= limit), key=lambda i: len(ids[i]))
        if len(fitting) < len(ids):
            logger.warning(
                f"{len(ids) - len(fitting)} of {len(ids)} dialogues have more than max_length={max_length} tokens; "
                "their rewards are nan, since training leaves such dialogues out."
            )
        for start in range(0, len(fitting), batch_size):
            batch = fitting[start : start + batch_size]
            rows = [torch.tensor(ids[i]) for i in batch]
            pad = torch.nn.utils.rnn.pad_sequence
            input_ids = pad(rows, batch_first=True, padding_value=self.pad_token_id).to(self.device)
            attention_mask = pad([torch.ones_like(row) for row in rows], batch_first=True).to(self.device)
            with torch.inference_mode():
                logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
            for i, reward in zip(batch, logits.squeeze(-1).tolist(), strict=True):
                rewards[i] = reward
        return rewards


def _load(model_folder: str, trust_remote_code: bool) -> Any:
    kwargs: dict[str, Any] = {"num_labels": 1, "dtype": torch.float32, "trust_remote_code": trust_remote_code}
    if find_adapter_config_file(model_folder) is not None:
        return load_adapted_model(model_folder, **kwargs)
    with explaining(model_folder):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            model_folder, output_loading_info=True, **kwargs
        )
    if report["missing_keys"]:
        raise UserError(
            f"{model_folder} is not a saved reward model: it lacks {sorted(report['missing_keys'])}, so its rewards "
            "would be random. Train it first (`trl-tpu reward`), and score with the folder that training saved."
        )
    return model


def score_texts(
    model_folder: str,
    texts_or_conversations: Sequence[str] | Sequence[list[dict[str, Any]]],
    batch_size: int = 8,
    max_length: int | None = None,
) -> list[float]:
    """Compute rewards of texts or conversations by a saved reward model, in plain torch and float32.

    Args:
        model_folder: Folder (or Hub id) of a saved reward model or of its adapters.
        texts_or_conversations: Texts, or lists of messages (``{"role": ..., "content": ...}``).
        batch_size: Dialogues per forward pass.
        max_length: Dialogues of more tokens get nan, as training leaves them out; no limit when None.

    Returns:
        One reward per dialogue, in order.

    Raises:
        UserError: Messages for a tokenizer without a chat template, a model without a pad token, no tokens.
    """
    scorer = Scorer(model_folder)
    return scorer.rewards([scorer.token_ids(dialogue) for dialogue in texts_or_conversations], batch_size, max_length)


def score_dataset(
    scorer: Scorer, rows: Dataset, batch_size: int = 8, max_length: int | None = None
) -> dict[str, list[float]]:
    """Compute rewards of a dataset's rows.

    Args:
        scorer: The model.
        rows: N rows with ``chosen`` and ``rejected`` (in any form that training takes), else ``messages`` or ``text``.
        batch_size: Dialogues per forward pass.
        max_length: Dialogues of more tokens get nan; no limit when None.

    Returns:
        New columns of N rewards: ``reward_chosen`` and ``reward_rejected``, or ``reward``.

    Raises:
        UserError: None of these columns.
    """
    columns = rows.column_names
    if {"chosen", "rejected"} <= set(columns):
        size = scorer.model.get_input_embeddings().weight.shape[0]
        pairs: Any = prepare_preference_dataset(
            rows, scorer.tokenizer, num_embeddings=size, max_length=None, num_proc=None, name="scored"
        )
        halves = {"reward_chosen": list(pairs["chosen_ids"]), "reward_rejected": list(pairs["rejected_ids"])}
        both = scorer.rewards([*halves["reward_chosen"], *halves["reward_rejected"]], batch_size, max_length)
        return {"reward_chosen": both[: len(rows)], "reward_rejected": both[len(rows) :]}
    column = next((name for name in ("messages", "text") if name in columns), None)
    if column is None:
        raise UserError(
            f"Rows to score need the columns chosen and rejected, or messages, or text; they have {columns}."
        )
    ids = [scorer.token_ids(dialogue) for dialogue in rows[column]]
    return {"reward": scorer.rewards(ids, batch_size, max_length)}


def main(args: ScoreArguments) -> None:
    """Score what the arguments name, print a summary, and write the rows where `output` says.

    Raises:
        UserError: Not exactly one of `text` and `dataset_name`, several splits and none chosen, or an `output` that
            is the dataset itself.
    """
    if bool(args.text) == bool(args.dataset_name):
        raise UserError("Give either `--text` (it may be repeated) or `--dataset_name`, and not both.")
    rows = _rows(args)
    scorer = Scorer(args.model_name_or_path, args.trust_remote_code)
    scored = score_dataset(scorer, rows, args.batch_size, args.max_length)
    if args.text:
        for text, reward in zip(args.text, scored["reward"], strict=True):
            print(f"{reward:10.4f}  {text}")
    else:
        print(summary(scored))
    if args.output:
        write_rows(args.output, rows, scored)
        print(f"Rewards of {len(rows)} rows written to {args.output}")


def _rows(args: ScoreArguments) -> Any:
    if args.text:
        return Dataset.from_dict({"text": args.text})
    name = str(args.dataset_name)
    if args.output and Path(args.output).resolve() == Path(name).resolve():
        raise UserError(f"`output` is the dataset itself, {name}: name another file.")
    splits = datafiles.load(name, name=args.dataset_config)
    if args.dataset_split is None and len(splits) > 1:
        raise UserError(f"{name} has several splits: {', '.join(splits)}. Choose one with `--dataset_split`.")
    return datafiles.pick_split(splits, args.dataset_split or next(iter(splits)), name)


def summary(scored: dict[str, list[float]]) -> str:
    """Sum rewards up in a few lines: count, accuracy and margin of pairs, mean and range of each column."""
    lines = []
    if "reward_chosen" in scored:
        margins = [c - r for c, r in zip(scored["reward_chosen"], scored["reward_rejected"], strict=True)]
        margins = [margin for margin in margins if not math.isnan(margin)]
        if margins:
            right = sum(margin > 0 for margin in margins)
            lines += [
                f"pairs            {len(margins)}",
                f"accuracy         {right / len(margins):.4f}",
                f"ties             {sum(margin == 0 for margin in margins)}",
                f"mean margin      {sum(margins) / len(margins):.4f}",
            ]
    for column, rewards in scored.items():
        finite = [reward for reward in rewards if not math.isnan(reward)]
        if finite:
            mean = sum(finite) / len(finite)
            lines.append(f"{column:<16} mean {mean:.4f}, min {min(finite):.4f}, max {max(finite):.4f}")
    return "\n".join(lines) or "no row was scored"


def write_rows(output: str, rows: Dataset, scored: dict[str, list[float]]) -> None:
    """Write the rows and their rewards as JSON Lines; a reward of nan is null, which JSON can say."""
    with open(output, "w", encoding="utf-8") as file:
        for index, row in enumerate(rows):
            rewards = {key: None if math.isnan(values[index]) else values[index] for key, values in scored.items()}
            file.write(json.dumps({**row, **rewards}, ensure_ascii=False, default=str) + "\n")


def make_parser(prog: str | None = None) -> TrlParser:
    """Make the parser of the command's flags."""
    return TrlParser(ScoreArguments, prog=prog)


def run(argv: list[str]) -> int:
    """Run the command ``trl-tpu score``; returns the exit status."""
    (args,) = make_parser(prog="trl-tpu score").parse_args_and_config(argv)
    main(args)
    return 0
