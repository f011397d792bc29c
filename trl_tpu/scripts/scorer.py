"""A saved reward model that gives dialogues their rewards, in plain torch."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.utils import find_adapter_config_file

from trl_tpu.data import checks
from trl_tpu.data.tokenize import tokenize_dialogue, with_eos
from trl_tpu.errors import UserError
from trl_tpu.modeling.adapters import load_adapted_model
from trl_tpu.modeling.load import load_classifier, load_tokenizer
from trl_tpu.modeling.positions import learned_positions

logger = logging.getLogger(__name__)

Dialogue = str | list[dict[str, Any]]

_BATCHES_AT_ONCE = 16  # sorted by length, batches waste little on padding; few, so that rows are written soon


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
        self.num_embeddings: int = self.model.get_input_embeddings().weight.shape[0]

    def token_ids(
        self, dialogue: Dialogue, row: Mapping[str, Any] | None = None, column: str = "dialogue", index: int = 0
    ) -> list[int]:
        """Tokenize a dialogue as training does: text ends with the EOS, messages go through the template.

        Args:
            dialogue: Text or messages.
            row: May hold ``tools`` and ``chat_template_kwargs`` for the template.
            column: What errors call the dialogue.
            index: The number of its row, for errors.

        Raises:
            UserError: Neither text nor messages, messages that cannot be rendered, no tokens, or tokens that the
                model lacks.
        """
        where = checks.row_of(index, "scored")
        checks.check_dialogue(dialogue, column, where)
        if isinstance(dialogue, list) and self.tokenizer.chat_template is None:
            raise UserError("This model's tokenizer has no chat template, so it scores text, not messages.")
        ended = with_eos(dialogue, self.tokenizer)
        ids = tokenize_dialogue(ended, self.tokenizer, row or {}, f"{where}: `{column}`")
        checks.check_ids(ids, column, where, self.num_embeddings)
        return ids

    def score(
        self, ids: Mapping[str, Sequence[list[int]]], batch_size: int = 8, max_length: int | None = None
    ) -> Iterator[dict[str, float]]:
        """Return an iterator over the rows' rewards, by their column, after checking all rows; it computes them.

        A dialogue of more than `max_length` tokens gets nan.

        Args:
            ids: The tokenized dialogues of N rows, by the column that they come from.
            batch_size: Dialogues per forward pass.
            max_length: Most tokens of a dialogue that gets a reward; no limit when None.

        Raises:
            UserError: A dialogue for which the model has no positions, or a batch size below 1.
        """
        limit = math.inf if max_length is None else max_length
        self._check(ids, batch_size, limit)
        rows = [dict(zip(ids, dialogues, strict=True)) for dialogues in zip(*ids.values(), strict=True)]
        return self._scored(rows, batch_size, limit)

    def _scored(self, rows: list[dict[str, list[int]]], batch_size: int, limit: float) -> Iterator[dict[str, float]]:
        not_finite = []
        for start in range(0, len(rows), batch_size * _BATCHES_AT_ONCE):
            some = rows[start : start + batch_size * _BATCHES_AT_ONCE]
            fitting = [tokens for row in some for tokens in row.values() if len(tokens) <= limit]
            rewards = iter(self._rewards(fitting, batch_size))
            for index, row in enumerate(some, start):
                scored = {column: next(rewards) for column, tokens in row.items() if len(tokens) <= limit}
                not_finite += [index for reward in scored.values() if not math.isfinite(reward)]
                yield {reward_column(column): scored.get(column, math.nan) for column in row}
        if not_finite:
            logger.warning(
                f"{len(not_finite)} rewards are not finite, of the rows {_first(not_finite)}: the model computes inf "
                "or nan there. They are null in the output, and the summary leaves them out."
            )

    def _check(self, ids: Mapping[str, Sequence[list[int]]], batch_size: int, limit: float) -> None:
        if batch_size < 1:
            raise UserError(f"`batch_size` must be 1 or more, not {batch_size}.")
        positions = learned_positions(self.model) or math.inf
        too_long = 0
        for column, dialogues in ids.items():
            for index, tokens in enumerate(dialogues):
                too_long += len(tokens) > limit
                if positions < len(tokens) <= limit:
                    raise UserError(
                        f"{checks.row_of(index, 'scored')}: `{column}` has {len(tokens)} tokens, but the model has "
                        f"learned {positions} positions (`max_position_embeddings`). Shorten it, or set "
                        f"max_length={positions} to give such dialogues no reward."
                    )
        if too_long:
            logger.warning(
                f"{too_long} of {sum(map(len, ids.values()))} dialogues have more than max_length={limit} tokens; "
                "their rewards are nan, since training leaves such dialogues out."
            )

    def _rewards(self, ids: list[list[int]], batch_size: int) -> list[float]:
        """Compute rewards of tokenized dialogues, in order."""
        rewards = [math.nan] * len(ids)
        by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        for start in range(0, len(by_length), batch_size):
            batch = by_length[start : start + batch_size]
            rows = [torch.tensor(ids[i]) for i in batch]
            pad = torch.nn.utils.rnn.pad_sequence
            input_ids = pad(rows, batch_first=True, padding_value=self.pad_token_id).to(self.device)
            attention_mask = pad([torch.ones_like(row) for row in rows], batch_first=True).to(self.device)
            with torch.inference_mode():
                logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
            for i, reward in zip(batch, logits.squeeze(-1).tolist(), strict=True):
                rewards[i] = reward
        return rewards


def reward_column(column: str) -> str:
    """Name the column for the rewards of a column of dialogues: two for pairs, which have two."""
    return f"reward_{column}" if column in checks.RAW_COLUMNS else "reward"


def _first(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")


def _load(model_folder: str, trust_remote_code: bool) -> Any:
    kwargs: dict[str, Any] = {"num_labels": 1, "dtype": torch.float32, "trust_remote_code": trust_remote_code}
    if find_adapter_config_file(model_folder) is not None:
        return load_adapted_model(model_folder, **kwargs)
    model, report = load_classifier(model_folder, **kwargs)
    if report["missing_keys"]:
        raise UserError(
            f"{model_folder} is not a saved reward model: it lacks {sorted(report['missing_keys'])}, so its rewards "
            "would be random. Train it first (`trl-tpu reward`), and score with the folder that training saved."
        )
    return model
