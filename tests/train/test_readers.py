"""A saved reward model gives the trainer's rewards in every program that reads it."""

import json
import math
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, LoraConfig
from tokenizers import processors
from training import QUIET, trained
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

import trl_tpu
from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.checkpoint.export import export_checkpoint
from trl_tpu.modeling.head_spec import BASE_CONFIG, IDENTITY

# ---- loading and scoring by the rules of other programs

Ids = list[list[int]]


def load(folder: str) -> Any:
    """Load with transformers; adapters with the base config saved next to them."""
    beside = {"config": AutoConfig.from_pretrained(str(Path(folder, BASE_CONFIG)))} if has_adapters(folder) else {}
    return AutoModelForSequenceClassification.from_pretrained(folder, **beside).eval()


def has_adapters(folder: str) -> bool:
    return Path(folder, "adapter_config.json").is_file()


def padded(folder: str, ids: Ids, side: str = "right") -> Any:
    return AutoTokenizer.from_pretrained(folder).pad({"input_ids": ids}, padding_side=side, return_tensors="pt")


@torch.no_grad()
def transformers_rewards(folder: str, ids: Ids, side: str) -> list[float]:
    return load(folder)(**padded(folder, ids, side)).logits.squeeze(-1).tolist()


def pipeline_rewards(folder: str, texts: list[str], **tokenizing: Any) -> list[float]:
    """Score with the default pipeline, which applies a sigmoid to a single label unless the config says regression."""
    model = load(folder) if has_adapters(folder) else folder  # a pipeline loads adapters by their base model's config
    read = pipeline("text-classification", model=model, tokenizer=folder, device="cpu")
    return [each["score"] for each in read(texts, **tokenizing)]


@torch.no_grad()
def last_token_rewards(folder: str, ids: Ids) -> list[float]:
    """Score as vLLM and SGLang pool: at the last token, whatever it is."""
    model = load(folder)
    backbone = getattr(model, model.base_model_prefix)
    return [model.score(backbone(torch.tensor([row])).last_hidden_state[0, -1]).item() for row in ids]


@torch.no_grad()
def openrlhf_rewards(folder: str, ids: Ids) -> list[float]:
    """Score as OpenRLHF's `get_llm_for_sequence_regression`: backbone, head ``score``, mean and std of the config.

    https://github.com/OpenRLHF/OpenRLHF/blob/main/openrlhf/models/model.py
    """
    config = AutoConfig.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    assert isinstance(model.score, torch.nn.Linear) and model.score.bias is None
    batch = padded(folder, ids, "left")
    mask = batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    hidden = getattr(model, model.base_model_prefix)(**batch, position_ids=positions).last_hidden_state
    rewards = model.score(hidden)[:, -1, 0]  # padding is on the left, so the last column is the last token
    return ((rewards - config.mean) / config.std).tolist()


@torch.no_grad()
def rewardbench_rewards(folder: str, texts: list[str]) -> list[float]:
    """Score as rewardbench 0.1.4: padding on the left, and the first of two BOS tokens masked in attention.

    https://github.com/allenai/reward-bench/blob/main/rewardbench/models/pipeline.py
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    starts = batch["attention_mask"].argmax(-1)
    for row, start in enumerate(starts.tolist()):
        first = batch["input_ids"][row, start : start + 2].tolist()
        if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] * 2:
            batch["attention_mask"][row, start] = 0
    return model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1).tolist()


# ---- saved models

QUESTIONS = ["Count on from 3:", "Count on from 11:", "Say something about the weather, please:", "Stop."]
ANSWERED = [" 4 5 6", " 12", " rain", " stop stop"]
REFUSED = [" 6 5", " 11 10 12 13", " It is what it is", " go"]
CLOSE = {"rel": 1e-4, "abs": 1e-4}  # rewards are about 1; float32, other batches, other summation order


class Saved(NamedTuple):
    """The folder of a trained model, and its trainer's rewards of conversations."""

    folder: str
    trainer: RewardTrainer
    tokenizer: Any
    texts: list[str]
    messages: list[list[dict[str, str]]]
    of_texts: list[float]
    of_messages: list[float]

    @property
    def scores_eos(self) -> bool:
        """Tell if the final EOS is the scored token."""
        return self.tokenizer.pad_token_id != self.tokenizer.eos_token_id

    def config(self) -> dict[str, Any]:
        return json.loads(Path(self.folder, BASE_CONFIG if has_adapters(self.folder) else "config.json").read_text())

    def ids_of_texts(self) -> list[list[int]]:
        """Return texts that end in the EOS, as in training."""
        return self.tokenizer([text + self.tokenizer.eos_token for text in self.texts])["input_ids"]

    def rendered(self) -> list[str]:
        return [self.tokenizer.apply_chat_template(each, tokenize=False) for each in self.messages]


def make_tokenizer(pads: bool, bos: bool) -> Any:
    """Build a tokenizer with or without a pad token. In some families both tokenizer and template add a BOS."""
    tokenizer = tiny.tiny_tokenizer([*QUESTIONS, *ANSWERED, *REFUSED], 400)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.add_tokens(["<|reserved_special_token_0|>"], special_tokens=True)
    if bos:
        marked = ("<bos>", tokenizer.bos_token_id)
        tokenizer._tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[marked])
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    if not pads:
        tokenizer.pad_token = None
        # this template ends conversations in the EOS, where readers differ
        tokenizer.chat_template = str(tokenizer.chat_template) + "{{ eos_token }}"
    return tokenizer


CASES: dict[str, dict[str, Any]] = {
    "llama": {"bos": True},
    "llama, own pad": {"bos": True, "pads": False, "own": True},
    "qwen2, pad is eos": {"pads": False},
    "qwen3": {},
    "gemma2": {"bos": True},
    "llama, adapters": {"bos": True, "lora": True},
    "qwen2, adapters, own pad": {"pads": False, "own": True, "lora": True},
}


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("readers")
    tokenizer = make_tokenizer(case.get("pads", True), case.get("bos", False))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer) + 7}
    others = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": None, "initializer_range": 0.2}
    config = AutoConfig.for_model(request.param.partition(",")[0], max_position_embeddings=512, **sizes, **others)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    settings = QUIET | {"max_steps": 3, "learning_rate": 0.02, "per_device_train_batch_size": 2}
    args = RewardConfig(str(folder / "run"), **settings, save_strategy="no", own_pad_token=case.get("own", False))
    messages = [
        [[{"role": "user", "content": asked}, {"role": "assistant", "content": answer}] for asked, answer in pairs]
        for pairs in (zip(QUESTIONS, ANSWERED, strict=True), zip(QUESTIONS, REFUSED, strict=True))
    ]
    pairs = Dataset.from_dict({"chosen": messages[0], "rejected": messages[1]})
    halves = {"chosen": ANSWERED, "rejected": REFUSED}
    texts = Dataset.from_dict({half: [*map(add, QUESTIONS, answers)] for half, answers in halves.items()})
    lora = LoraConfig(task_type="SEQ_CLS", r=4, init_lora_weights=False) if "lora" in case else None
    data = {"train_dataset": pairs, "eval_dataset": pairs}
    trainer = trained(RewardTrainer(str(folder / "base"), args, **data, peft_config=lora))
    trainer.evaluate()
    trainer.save_model()
    of_texts, of_messages = (trainer.predict(each).predictions.T.ravel().tolist() for each in (texts, pairs))
    rows = [*texts["chosen"], *texts["rejected"]], [*messages[0], *messages[1]]
    return Saved(str(folder / "run"), trainer, trainer.processing_class, *rows, of_texts, of_messages)


def test_config_describes_the_reward_head(saved: Saved) -> None:
    config = saved.config()
    assert config["problem_type"] == "regression"
    assert config["sentence_transformers"]["activation_fn"] == IDENTITY
    assert config["id2label"] == {"0": "LABEL_0"} and config["label2id"] == {"LABEL_0": 0}
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert config["pad_token_id"] == saved.tokenizer.pad_token_id
    assert config["eos_token_id"] == saved.tokenizer.eos_token_id
    assert config["dtype"] == config["head_dtype"] == "float32"
    assert config["mean"] == pytest.approx(np.mean(saved.of_messages), rel=1e-5)
    assert config["std"] == pytest.approx(np.std(saved.of_messages), rel=1e-5)
    assert np.std(saved.of_messages) > 0.05 and np.std(saved.of_texts) > 0.05, "rewards are distinguishable"
    if not has_adapters(saved.folder):  # transformers before 5 silently uses 10,000 otherwise
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert Path(saved.folder, "chat_template.jinja").read_text() == saved.tokenizer.chat_template


def test_transformers_gives_the_trainers_rewards(saved: Saved) -> None:
    for side in ("right", "left"):
        found = transformers_rewards(saved.folder, saved.ids_of_texts(), side)
        assert found == pytest.approx(saved.of_texts, **CLOSE)
    ids = saved.tokenizer(saved.rendered(), add_special_tokens=False)["input_ids"]
    assert transformers_rewards(saved.folder, ids, "right") == pytest.approx(saved.of_messages, **CLOSE)


def test_score_gives_the_trainers_rewards(saved: Saved) -> None:
    """On request, rewards are standardized by the saved mean and std."""
    for dialogues, expected in ((saved.texts, saved.of_texts), (saved.messages, saved.of_messages)):
        rows = trl_tpu.score(saved.folder, dialogues)
        assert [row["reward"] for row in rows] == pytest.approx(expected, **CLOSE)
    mean, std = np.mean(saved.of_messages), np.std(saved.of_messages)
    rows = trl_tpu.score(saved.folder, saved.messages, standardize=True)
    standardized = [(reward - mean) / std for reward in saved.of_messages]
    assert [row["reward"] for row in rows] == pytest.approx(standardized, rel=1e-4, abs=1e-4 / std)


def test_default_pipeline_applies_no_sigmoid(saved: Saved) -> None:
    ended = [text + saved.tokenizer.eos_token for text in saved.texts]
    assert pipeline_rewards(saved.folder, ended) == pytest.approx(saved.of_texts, **CLOSE)
    found = pipeline_rewards(saved.folder, saved.rendered(), add_special_tokens=False)
    assert found == pytest.approx(saved.of_messages, **CLOSE)


def test_last_token_servers_give_the_trainers_rewards(saved: Saved) -> None:
    eos = saved.tokenizer.eos_token_id
    ids = saved.tokenizer(saved.rendered(), add_special_tokens=False)["input_ids"]
    for tokens, rewards in ((ids, saved.of_messages), (saved.ids_of_texts(), saved.of_texts)):
        if saved.scores_eos:
            assert last_token_rewards(saved.folder, tokens) == pytest.approx(rewards, **CLOSE)
        else:  # as stated by the warning and the card: rewards differ unless the EOS is omitted
            assert last_token_rewards(saved.folder, tokens) != pytest.approx(rewards, rel=1e-2)
            without = [row[:-1] if row[-1] == eos else row for row in tokens]
            assert last_token_rewards(saved.folder, without) == pytest.approx(rewards, **CLOSE)


def test_openrlhf_gives_the_trainers_rewards(saved: Saved) -> None:
    if has_adapters(saved.folder) or not saved.scores_eos:
        pytest.skip("loads only merged models (`trl-tpu export --merge`) and scores the last token, like servers")
    config = saved.config()
    normalized = [(reward - config["mean"]) / config["std"] for reward in saved.of_texts]
    found = openrlhf_rewards(saved.folder, saved.ids_of_texts())
    assert found == pytest.approx(normalized, rel=1e-4, abs=1e-4 / config["std"])


def test_rewardbench_gives_the_trainers_rewards(saved: Saved) -> None:
    assert rewardbench_rewards(saved.folder, saved.rendered()) == pytest.approx(saved.of_messages, **CLOSE)


def test_peft_and_a_merged_export_give_the_trainers_rewards(saved: Saved, tmp_path: Path) -> None:
    if not has_adapters(saved.folder):
        pytest.skip("not an adapter")
    model = AutoPeftModelForSequenceClassification.from_pretrained(saved.folder, num_labels=1).eval()
    with torch.no_grad():
        found = [model(input_ids=torch.tensor([row])).logits.item() for row in saved.ids_of_texts()]
    if saved.scores_eos:  # peft ignores the pad token and scores a single sequence at its last token
        assert found == pytest.approx(saved.of_texts, **CLOSE)
    export_checkpoint(saved.folder, tmp_path / "merged", merge=True)
    merged = json.loads((tmp_path / "merged/config.json").read_text())
    assert merged["rope_theta"] == merged["rope_parameters"]["rope_theta"]
    own = saved.config()
    assert all(merged[key] == own[key] for key in ("problem_type", "sentence_transformers", "mean", "std"))
    found = transformers_rewards(str(tmp_path / "merged"), saved.ids_of_texts(), "left")
    assert found == pytest.approx(saved.of_texts, **CLOSE)


@pytest.mark.parametrize("saved", ["qwen2, pad is eos", "gemma2"], indirect=True)
def test_trls_grpo_trainer_gives_the_trainers_rewards(saved: Saved, tmp_path: Path) -> None:
    """One step, in which the reward model's forward is recorded. Adapters are merged first."""
    from trl import GRPOConfig, GRPOTrainer

    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    settings = {"max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6}
    args = GRPOConfig(str(tmp_path), report_to="none", bf16=False, use_cpu=True, **settings)
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": asked}] for asked in QUESTIONS]})
    base = str(Path(saved.folder).parent / "base")
    grpo = GRPOTrainer(base, reward_funcs=saved.folder, args=args, train_dataset=prompts)
    reward_model: Any = grpo.reward_funcs[0]
    reward_model.register_forward_hook(
        lambda _, __, given, out: seen.append((given["input_ids"], given["attention_mask"], out.logits)),
        with_kwargs=True,
    )
    grpo.train()
    ((ids, mask, logits),) = seen
    rows = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    half = len(rows) // 2
    own = saved.trainer.predict(Dataset.from_dict({"chosen_ids": rows[:half], "rejected_ids": rows[half:]}))
    assert logits.squeeze(-1).tolist() == pytest.approx(own.predictions.T.ravel().tolist(), **CLOSE)
    assert math.isfinite(grpo.state.log_history[0]["reward"])
