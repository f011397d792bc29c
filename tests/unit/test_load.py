"""Models and tokenizers are loaded and aligned as by TRL 1.16's trainer, and the user's tokenizer is kept."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from checkpoints import same_weights
from datasets import Dataset
from preference_rows import TEMPLATE, tiny_config, tiny_model, tiny_tokenizer
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, BertConfig, ElectraConfig, Qwen2ForCausalLM, set_seed
from trl.trainer.utils import create_model_from_path

import trl_tpu
from trl_tpu.errors import UserError
from trl_tpu.modeling import load
from trl_tpu.modeling.adapters import load_adapted_model
from trl_tpu.modeling.build import build_reward_model
from trl_tpu.modeling.head_spec import HeadSpec
from trl_tpu.modeling.heads import model_without_weights

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|endoftext|>")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a causal language model in bfloat16 with its tokenizer."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    set_seed(1)
    Qwen2ForCausalLM(tiny_config()).to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tokenizer with its own chat template and one token that `tiny_tokenizer` lacks."""
    folder = str(tmp_path_factory.mktemp("source"))
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|eot|>"})
    tokenizer.chat_template = "SOURCE " + TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def trainer_of(package: Any, folder: Path, settings: Any = None, n_gpu: int = 1, **changed: Any) -> Any:
    """Build TRL's trainer, or this package's, on one pair."""
    model = tiny_model()
    model.config._name_or_path = "no-such-model"
    pairs = Dataset.from_list([{"chosen": "a", "rejected": "b"}])
    args = package.RewardConfig(str(folder), use_cpu=True, bf16=False, report_to="none", **settings or {})
    args._n_gpu = n_gpu
    given = {"model": model, "train_dataset": pairs, "processing_class": tiny_tokenizer(), **changed}
    return package.RewardTrainer(args=args, **given)


def settle(model: Any, tokenizer: Any, **settings: Any) -> Any:
    return load.set_special_tokens(model, tokenizer, trl_tpu.RewardConfig("out", report_to="none", **settings))[0]


def test_loaded_model_equals_trls_with_the_same_random_head(checkpoint: str, tmp_path: Path) -> None:
    theirs = trainer_of(trl, tmp_path, {"seed": 7}, model=checkpoint).model
    set_seed(7)
    ours = load.load_model(checkpoint)
    assert ours.config.num_labels == 1 and ours.dtype == torch.float32
    assert same_weights(ours.state_dict(), theirs.state_dict())


def test_disabled_dropout_includes_dropout_of_functions(checkpoint: str) -> None:
    model, ids = load.load_model(checkpoint, attention_dropout=0.5), torch.tensor([[3, 4, 5, 6]])
    load.disable_dropout_in_model(model)
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)


def test_loading_arguments_equal_trls_or_are_named(checkpoint: str, tmp_path: Path, caplog: Any) -> None:
    for dtype in ("bfloat16", "auto", None, torch.bfloat16):
        theirs = create_model_from_path(checkpoint, AutoModelForSequenceClassification, dtype=dtype, num_labels=1)
        assert load.load_model(checkpoint, dtype=dtype).dtype == theirs.dtype
    # the old name of the argument: TRL 1.16 silently loads float32
    assert load.load_model(checkpoint, torch_dtype="bfloat16").dtype == torch.bfloat16
    assert load.load_model(checkpoint, num_labels=3).config.num_labels == 1
    assert "num_labels=3" in caplog.text
    args = trl_tpu.RewardConfig("out", report_to="none", model_init_kwargs={"quantization_config": 1})
    with pytest.raises(UserError, match="quantization_config"):
        build_reward_model(checkpoint, args, quantization_config=1)
    tiny_model(num_labels=2).save_pretrained(tmp_path)
    for in_files in (False, True):
        with pytest.raises(UserError, match="num_labels=1") as rejected:
            load.load_model(str(tmp_path), in_files=in_files)
        assert "ignore_mismatched_sizes" not in str(rejected.value)  # transformers' words
    assert load.load_model(str(tmp_path), ignore_mismatched_sizes=True).score.weight.shape[0] == 1


@pytest.mark.parametrize("separator", [None, "\n"])
@pytest.mark.parametrize("in_files", [False, True])
def test_head_under_another_name_is_read(
    separator: str | None, in_files: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = HeadSpec(step_separator=separator)
    labels = len(outputs.weights)
    written = outputs.auto_class.from_config(tiny_config(num_labels=labels))
    tensors = written.state_dict()
    written.save_pretrained(tmp_path)

    def loaded(**tensors: Any) -> Any:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        kwargs: Any = {"num_labels": labels, "trust_remote_code": False}
        return load.load_classifier(str(tmp_path), outputs, in_files=in_files, **kwargs)

    head = tensors.pop("score.weight")
    model, info = loaded(**tensors, **{"value_head.weight": head, "lm_head.weight": torch.zeros(260, 2)})
    assert not info["missing_keys"] and torch.equal(model.score.weight, head)
    assert "offloaded" not in caplog.text  # accelerate warns, but the weights will be read
    with pytest.raises(UserError, match=r"score\.weight"):
        loaded(**tensors)
    config = tmp_path / "config.json"
    config.write_text(re.sub("For(Sequence|Token)Classification", "ForCausalLM", config.read_text()))
    tensors.pop("score.bias", None)
    _, info = loaded(**tensors, **{"extra.weight": torch.zeros(3, 3)})
    assert "score.weight" in info["missing_keys"]  # a language model gets a new head
    biased = {"value_head.weight": head, "value_head.bias": torch.ones(labels)}
    if separator is None:
        with pytest.raises(UserError, match=r"score\.weight"):
            loaded(**tensors, **biased)
    else:  # token classifiers have a bias
        model, info = loaded(**tensors, **biased)
        assert not info["missing_keys"] and model.score.bias.tolist() == [1.0, 1.0]


def save_with(folder: Path, model: Any, changes: dict[str, Any], kind: str = "model.safetensors") -> str:
    """Save a model with changed tensors (None removes one), in one file or in two shards."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    tensors = {key: tensor.clone() for key, tensor in (model.state_dict() | changes).items() if tensor is not None}
    parts = {kind: tensors}
    if "-of-" in kind:
        first = dict(list(tensors.items())[:3])
        parts = {
            kind: first,
            kind.replace("1-of", "2-of"): {key: tensors[key] for key in tensors.keys() - first.keys()},
        }
        index = {"metadata": {}, "weight_map": {key: file for file, part in parts.items() for key in part}}
        (folder / f"{kind.partition('-')[0]}{Path(kind).suffix}.index.json").write_text(json.dumps(index))
    for file, part in parts.items():
        write(folder / file, part)
    return str(folder)


def write(file: Path, tensors: dict[str, Any]) -> None:
    save_file(tensors, file, {"format": "pt"}) if file.suffix == ".safetensors" else torch.save(tensors, file)


FILES = (
    "model.safetensors",
    "pytorch_model.bin",
    "model-00001-of-00002.safetensors",
    "pytorch_model-00001-of-00002.bin",
)
SUMMARY = "v_head.summary.weight"


@pytest.mark.parametrize("kind", FILES)
def test_weights_other_than_the_head_must_be_in_the_files(kind: str, tmp_path: Path) -> None:
    parts = ("embed_tokens.weight", "layers.0.mlp.down_proj.weight", "norm.weight", "layers.0.self_attn.q_proj.bias")
    for separator in (None, "\n"):
        for index, part in enumerate(parts):
            folder = save_with(tmp_path / f"{index}", Qwen2ForCausalLM(tiny_config()), {f"model.{part}": None}, kind)
            for in_files in (False, True):
                with pytest.raises(UserError, match=f"lacks 1 .*{re.escape(part)}"):
                    load.load_model(folder, HeadSpec(step_separator=separator), in_files=in_files)
    base = save_with(tmp_path / "base", Qwen2ForCausalLM(tiny_config()), {}, kind)
    adapted = peft.get_peft_model(load.load_model(base), peft.LoraConfig(task_type="SEQ_CLS"))
    adapted.save_pretrained(tmp_path / "adapters")
    load.load_model(str(tmp_path / "adapters"))
    save_with(tmp_path / "base", Qwen2ForCausalLM(tiny_config()), {"model.norm.weight": None}, kind)
    with pytest.raises(UserError, match=r"lacks 1 .*norm\.weight"):
        load.load_model(str(tmp_path / "adapters"))


@pytest.mark.parametrize("part", ["bert.encoder.layer.0.output.LayerNorm.weight", "bert.pooler.dense.bias"])
def test_encoders_may_lack_a_pooler_but_no_part_of_one(part: str, tmp_path: Path) -> None:
    config = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    model = transformers.BertForPreTraining(BertConfig(vocab_size=260, **config))
    load.load_model(save_with(tmp_path, model, {"bert.pooler.dense.weight": None, "bert.pooler.dense.bias": None}))
    with pytest.raises(UserError, match=re.escape(part)):
        load.load_model(save_with(tmp_path, model, {part: None}))
    electra = transformers.ElectraForPreTraining(ElectraConfig(vocab_size=260, embedding_size=8, **config))
    electra.save_pretrained(tmp_path)
    load.load_model(str(tmp_path))  # its pre-training head has one output, and is no reward head
    with pytest.raises(UserError, match="classifier.bias"):  # BERT's head reads the pooler's output
        load.load_model(save_with(tmp_path, model, {SUMMARY: torch.ones(1, 8)}))


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize(
    ("kind", "file"),
    [*((kind, None) for kind in FILES), (FILES[0], "value_head.safetensors"), (FILES[1], "value_head.bin")],
)
def test_head_of_other_programs_is_read(kind: str, file: str | None, in_files: bool, tmp_path: Path) -> None:
    """TRL stores value heads next to a language model's weights, LLaMA-Factory in a file of their own."""
    head = {SUMMARY: torch.randn(1, tiny_config().hidden_size), "v_head.summary.bias": torch.zeros(1)}
    folder = save_with(tmp_path, Qwen2ForCausalLM(tiny_config()), {} if file else head, kind)
    if file:
        write(tmp_path / file, head)
    model, info = load.load_classifier(folder, HeadSpec(), in_files=in_files, num_labels=1)
    assert torch.equal(model.score.weight, head[SUMMARY]) and not info["missing_keys"]
    assert not any("v_head" in key for key in info["unexpected_keys"])
    scored: Any = load.load_model(folder, is_trainable=False)
    assert torch.equal(scored.score.weight, model.score.weight)


UNREADABLE_HEADS = [
    {"v_head.summary.bias": torch.ones(1)},
    {"score_head.weight": torch.ones(1, tiny_config().hidden_size)},
    {SUMMARY: torch.ones(1, 3)},
    {SUMMARY: torch.ones(tiny_config().hidden_size)},
    {SUMMARY: None, "v_head.0.weight": torch.ones(3, 3), "v_head.2.weight": torch.ones(1, 3)},
]


@pytest.mark.parametrize("changes", UNREADABLE_HEADS, ids=["bias", "two heads", "other size", "vector", "layers"])
@pytest.mark.parametrize("file", [None, "value_head.safetensors", "value_head.bin"])
def test_head_that_cannot_be_read_is_rejected(changes: dict[str, Any], file: str | None, tmp_path: Path) -> None:
    head = {SUMMARY: torch.ones(1, tiny_config().hidden_size)} | changes
    head = {key: tensor for key, tensor in head.items() if tensor is not None}
    folder = save_with(tmp_path, Qwen2ForCausalLM(tiny_config()), {} if file else head)
    if file:
        write(tmp_path / file, head)
    with pytest.raises(UserError, match=r"score\.weight"):
        load.load_model(folder)


def test_adapters_without_their_head_are_rejected(tmp_path: Path) -> None:
    base = save_with(tmp_path / "base", Qwen2ForCausalLM(tiny_config()), {})
    peft.get_peft_model(Qwen2ForCausalLM.from_pretrained(base), peft.LoraConfig()).save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match=r"score\.weight"):
        load_adapted_model(str(tmp_path / "plain"), HeadSpec(), num_labels=1)
    assert load.load_model(str(tmp_path / "plain")).base_model.model.score.weight.shape[0] == 1  # trains a new head


def test_incomplete_backbone_loads_equally_eager_or_streamed(tmp_path: Path) -> None:
    """Weights missing in the files, such as BERT's pooler, are created on the host even if others are streamed."""
    config = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    transformers.BertForMaskedLM(BertConfig(vocab_size=260, **config)).save_pretrained(tmp_path)
    models = []
    for in_files in (False, True):
        set_seed(3)
        models.append(load.load_model(str(tmp_path), in_files=in_files))
    assert same_weights(*(model.state_dict() for model in models))


ERRORS = [
    (OSError, "couldn.t connect", {"model": "no-such-model"}),
    (OSError, "couldn.t connect", {"processing_class": None}),
    (KeyError, "chosen", {"train_dataset": Dataset.from_list([{"text": "a"}])}),
    (ValueError, "nn.DataParallel", {"n_gpu": 2}),
]


@pytest.mark.parametrize(("kind", "told", "changed"), ERRORS)
def test_errors_have_trls_types(kind: type[Exception], told: str, changed: dict[str, Any], tmp_path: Path) -> None:
    for package in (trl, trl_tpu):
        with pytest.raises(kind, match=told) as raised:
            trainer_of(package, tmp_path, **changed)
    assert isinstance(raised.value, UserError) and str(raised.value)[0] != "'"


REJECTED = [
    (UserError, "nn.DataParallel", {"n_gpu": 2, "model": "no-such-model"}),  # before anything is loaded
    (UserError, "num_labels=2", {"model": tiny_model(num_labels=2)}),
    (AttributeError, "no attribute 'config'", {"model": torch.nn.Linear(1, 1)}),
]


@pytest.mark.parametrize(("kind", "told", "changed"), REJECTED, ids=["two GPUs", "two labels", "no config"])
def test_unusable_models_are_rejected(kind: type[Exception], told: str, changed: Any, tmp_path: Path) -> None:
    with pytest.raises(kind, match=told):
        trainer_of(trl_tpu, tmp_path, **changed)


class Processor(transformers.ProcessorMixin):
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer


def test_given_tokenizer_wins_over_the_models(checkpoint: str) -> None:
    tokenizer = tiny_tokenizer()
    for given in (tokenizer, Processor(tokenizer)):
        assert load.load_processing_class(tiny_model(), given) is tokenizer
    loaded = load.load_processing_class(load.load_model(checkpoint))
    assert loaded.get_vocab() == tokenizer.get_vocab() and loaded.chat_template == TEMPLATE


def test_tokenizer_is_read_from_the_folder(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(checkpoint, tmp_path / "repo" / "inner")
    load_tokenizer, asked = load.load_tokenizer, dict[str, Any]()
    monkeypatch.setattr(load, "load_tokenizer", lambda name, **how: asked.update(how) or load_tokenizer(name, **how))
    where = {"subfolder": "inner", "cache_dir": str(tmp_path / "cache"), "token": "hf_x", "local_files_only": True}
    args = trl_tpu.RewardConfig("out", report_to="none", model_init_kwargs={**where, "dtype": "float32"})
    _, tokenizer = build_reward_model(str(tmp_path / "repo"), args)
    assert asked == {**where, "trust_remote_code": False} and tokenizer.get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize("pad", [None, "<|begin|>"])
@pytest.mark.parametrize("eos", [None, "<|endoftext|>"])
@pytest.mark.parametrize("own_pad", ["<|im_start|>", None])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_special_tokens_equal_trls_and_tokenizer_is_kept(pad: Any, eos: Any, own_pad: Any, tmp_path: Path) -> None:
    settings = {"pad_token": pad, "eos_token": eos}
    theirs = trainer_of(trl, tmp_path, settings, processing_class=tiny_tokenizer(pad_token=own_pad))
    model, given = tiny_model(), tiny_tokenizer(pad_token=own_pad)
    before = given.special_tokens_map
    tokenizer = settle(model, given, **settings)
    assert tokenizer.special_tokens_map == theirs.processing_class.special_tokens_map
    assert model.config.pad_token_id == theirs.model.config.pad_token_id
    assert model.config.eos_token_id == theirs.model.config.eos_token_id
    assert given.special_tokens_map == before


RESERVED = [
    (["<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"], "<|finetune_right_pad_id|>"),  # Llama 3.1
    (["<|reserved_special_token_0|>", "<|reserved_special_token_1|>"], "<|reserved_special_token_0|>"),  # Llama 3
    (["<unused0>"], "<unused0>"),
    (["(pad)", "pad"], "<|pad|>"),  # ordinary words are not reserved tokens
    ([], "<|pad|>"),
    (["<|im_start|>", "<repo_name>", "<empty_output>", "<|im_end|>"], "<empty_output>"),  # SmolLM2
]


@pytest.mark.parametrize(("reserved", "taken"), RESERVED)
def test_own_pad_token_never_occurs_in_texts(reserved: list[str], taken: str) -> None:
    tokenizer = tiny_tokenizer(pad_token=None)
    tokenizer.add_tokens(reserved, special_tokens="pad" not in reserved)
    tokenizer.chat_template = "".join(SPECIAL)
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer) + (taken == "<|pad|>"))
    settled = settle(model, tokenizer, own_pad_token=True)
    assert settled.pad_token == taken and tokenizer.pad_token is None
    assert model.config.pad_token_id == settled.pad_token_id != settled.eos_token_id
    assert settle(model, settled, own_pad_token=True) is settled
    assert len(settled) == len(tokenizer) + (taken == "<|pad|>")


def test_chat_template_file_is_read_and_eos_must_be_a_token(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}", encoding="utf-8")
    given = tiny_tokenizer()
    tokenizer = settle(tiny_model(), given, chat_template_path=str(path))
    assert (tokenizer.chat_template, given.chat_template) == ("{{ messages }}", TEMPLATE)
    with pytest.raises(FileNotFoundError, match="none.j2"):
        settle(tiny_model(), given, chat_template_path=str(tmp_path / "none.j2"))
    with pytest.raises(UserError, match="eos_token"):
        settle(tiny_model(), given, eos_token="<none>")


@pytest.mark.parametrize("multiple", [64, None, 100])
def test_cloning_a_chat_template_equals_trls(source_tokenizer: str, multiple: int | None) -> None:
    results = []
    for clone in (load.clone_chat_template, trl.clone_chat_template):
        set_seed(3)
        model, tokenizer = tiny_model(), tiny_tokenizer()
        results.append((*clone(model, tokenizer, source_tokenizer, multiple), model, tokenizer))
    (model, tokenizer, added, given_model, given_tokenizer), (their_model, their_tokenizer, their_added, *_) = results
    assert model is given_model and tokenizer is given_tokenizer
    assert added == their_added and tokenizer.get_vocab() == their_tokenizer.get_vocab()
    assert tokenizer.chat_template == their_tokenizer.chat_template == "SOURCE " + TEMPLATE
    assert tokenizer.eos_token == their_tokenizer.eos_token == "<|eot|>"
    assert model.config.eos_token_id == their_model.config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer.get_vocab()) == model.get_input_embeddings().num_embeddings
    assert same_weights(model.state_dict(), their_model.state_dict())
    # planned models have no weights, so new embeddings are not set to the mean of the old ones
    planned = model_without_weights(tiny_config(), "float32")
    bare, *_ = load.clone_chat_template(planned, tiny_tokenizer(), source_tokenizer, multiple)
    shapes = {name: ("meta", parameter.shape) for name, parameter in model.named_parameters()}
    assert {name: (each.device.type, each.shape) for name, each in bare.named_parameters()} == shapes
    assert bare.config.vocab_size == model.config.vocab_size


@pytest.mark.parametrize("in_files", [False, True])
def test_report_omits_the_new_head_alone(in_files: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Qwen2ForCausalLM(tiny_config())
    load.load_model(save_with(tmp_path, model, {}), in_files=in_files)
    plain, changes = caplog.text, {"model.layers.0.extra.weight": torch.zeros(3)}
    load.load_model(save_with(tmp_path, model, changes), in_files=in_files)
    assert "MISSING" not in caplog.text and "layers.0.extra.weight | UNEXPECTED" in caplog.text.removeprefix(plain)
    with pytest.raises(UserError, match=r"lacks 1 weights .* model\.norm\.weight"):
        load.load_model(save_with(tmp_path, model, {"model.norm.weight": None}), in_files=in_files)
    assert not logging.getLogger("transformers.modeling_utils").filters
