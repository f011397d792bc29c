"""An exported model equals the checkpoint, in transformers' files. Rejected exports write nothing."""

import copy
import json
import pickle
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import fsspec
import peft
import pytest
import subprocesses
import tiny
import torch
import transformers
from checkpoints import reseal
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl_tpu import cli
from trl_tpu.checkpoint.export import _name_base_in_card, export_checkpoint
from trl_tpu.checkpoint.state_dict import trained_weights
from trl_tpu.compat.transformers4 import add_transformers4_names
from trl_tpu.errors import UserError

MODELS = {"llama": checkpoints.llama, "experts": checkpoints.experts, "tied": checkpoints.tied}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.state_dict()


# ---- full models


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_sharded_state_is_exported_as_transformers_files(make: Any, tmp_path: Path) -> None:
    model = make()
    checkpoint = checkpoints.checkpoint_of(model, tmp_path / "c")
    for size in ("5GB", "20KB"):
        out, reference = tmp_path / f"out-{size}", tmp_path / f"reference-{size}"
        export_checkpoint(checkpoint, out, max_shard_size=size)
        model.save_pretrained(reference, max_shard_size=size)
        assert checkpoints.same_weights(loaded(out), model.state_dict())
        names = {path.name for path in reference.iterdir()}
        assert {path.name for path in out.iterdir()} == names | {"tokenizer_config.json"}
        for name in names - {"config.json"}:
            assert (out / name).read_bytes() == (reference / name).read_bytes(), name
    assert len(names) > 4, "shards, their index, and the config"
    assert len(list(tmp_path.iterdir())) == 5, "only the outputs are left"


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_weights_of_two_dtypes_keep_every_bit(make: Any, tmp_path: Path) -> None:
    """Weights are written in the wider dtype, since ``from_pretrained`` reads a model in one dtype."""
    model = make().bfloat16()
    *_, last = model.parameters()
    last.data = torch.randn_like(last, dtype=torch.float32)
    checkpoints.checkpoint_of(model, tmp_path / "state")
    model.save_pretrained(tmp_path / "files")
    expected = {name: tensor.float() for name, tensor in model.state_dict().items()}
    for form in ("state", "files"):
        export_checkpoint(tmp_path / form, tmp_path / f"from_{form}")
        assert checkpoints.same_weights(loaded(tmp_path / f"from_{form}"), expected)


def test_checkpoint_in_shards_is_exported_in_another_dtype(tmp_path: Path) -> None:
    """Shards may be numbered with six digits, as in some releases of very large models."""
    model = checkpoints.llama()
    model.save_pretrained(tmp_path / "c", max_shard_size="20KB")
    index = tmp_path / "c" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("-of-", "-of-0"))
    for shard in (tmp_path / "c").glob("model-*.safetensors"):
        shard.rename(shard.with_name(shard.name.replace("-of-", "-of-0")))
    torch.save({}, tmp_path / "c" / "optimizer.pt")
    words = [str(tmp_path / "c"), str(tmp_path / "out"), "--dtype", "bfloat16", "--max_shard_size", "1MB"]
    assert cli.main(["export", *words]) == 0
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    assert checkpoints.same_weights(load_file(tmp_path / "out" / "model.safetensors"), expected)
    assert checkpoints.same_weights(loaded(tmp_path / "out"), expected)  # the dtype comes from the config
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_only_files_of_the_model_are_exported(tmp_path: Path) -> None:
    folder, out = tmp_path / "c", tmp_path / "out"
    checkpoints.llama().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoConfig": "own_config.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    classes = {"AutoTokenizer": ["own.Slow", None], "AutoProcessor": "user/other--theirs.Theirs"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes}))
    (folder / "own.py").write_text("from .used import x\nfrom .absent import y\nfrom ./../run import z\n")
    (folder / "additional_chat_templates").mkdir()
    along = ["tokenizer.json", "vocab.txt", "qwen.tiktoken", "spiece.model", "LICENSE", "README.md", "used.py"]
    along += ["own_config.py", "generation_config.json", "chat_template.jinja"]
    along += ["additional_chat_templates/tools.jinja"]
    beside = ["service-account.json", "notes.txt", "run.py", "trainer_state.json", "additional_chat_templates/key"]
    for name in (*along, *beside):
        (folder / name).write_text("{}")
    export_checkpoint(folder, out)
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == {"model.safetensors", "config.json", "tokenizer_config.json", "own.py", *along}


@pytest.mark.parametrize("out", ["../out", "../link", "."])
def test_existing_output_folder_is_kept_and_filled(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename cannot replace an output folder that is a mount point."""
    model = checkpoints.llama()
    model.save_pretrained(tmp_path / "c")
    (folder := tmp_path / "out").mkdir()
    (folder / "_unfinished" / "model").mkdir(parents=True)  # left by a killed export
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    before = folder.stat().st_ino
    export_checkpoint(tmp_path / "c", Path(out))
    assert folder.stat().st_ino == before and (tmp_path / "link").is_symlink()
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert checkpoints.same_weights(loaded(folder), model.state_dict())


# ---- configs for transformers 4

THETA, PART = {"rope_theta": 500.0}, {"partial_rotary_factor": 0.75}
NEOX = {"rotary_pct": 0.75, "rotary_emb_base": 500.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
SCALED = LONG | {"factor": 8.0, "attention_factor": 1.5}
NAMED = {"rope_type": "longrope", "original_max_position_embeddings": 32}
PHI3 = {"hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 64, **THETA}
PHI3 |= {"original_max_position_embeddings": 32}
OLD_ROPE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("glm", PART, {"rope_theta": 10000.0} | PART),
    ("phi", {"rope_parameters": LINEAR | THETA | PART}, THETA | PART | {"rope_scaling": LINEAR}),
    ("gpt_neox", NEOX, THETA | NEOX),
    ("phi3", PHI3 | {"rope_scaling": LONG}, THETA | {"partial_rotary_factor": 1.0, "rope_scaling": LONG}),
    ("phi3", PHI3 | {"rope_scaling": SCALED}, THETA | {"partial_rotary_factor": 1.0, "rope_scaling": SCALED | NAMED}),
]


@pytest.mark.parametrize(("family", "settings", "old"), OLD_ROPE)
def test_config_has_transformers_4_names_for_rope(family: str, settings: Any, old: Any, tmp_path: Path) -> None:
    """The names of transformers 5 are kept, and it reads the same values."""
    config: Any = AutoConfig.for_model(family, **copy.deepcopy(settings))
    config.save_pretrained(tmp_path)
    add_transformers4_names(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    names = {"rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "rope_scaling"}
    assert {name: written[name] for name in names & written.keys()} == old
    again: Any = AutoConfig.from_pretrained(tmp_path)
    assert written["rope_parameters"] == config.rope_parameters == again.rope_parameters


def test_saved_tokenizer_has_names_that_transformers_4_reads(tmp_path: Path) -> None:
    tokenizer = tiny.tiny_tokenizer(["some text"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<one>", "<two>"]})
    tokenizer.save_pretrained(tmp_path)
    add_transformers4_names(tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["model_input_names"] == ["input_ids", "attention_mask"]
    assert written["additional_special_tokens"] == ["<one>", "<two>"] and "extra_special_tokens" not in written
    again, text = AutoTokenizer.from_pretrained(tmp_path), "some text<one><eos>"
    assert type(again) is type(tokenizer) and again(text) == tokenizer(text)
    assert again.all_special_tokens == tokenizer.all_special_tokens
    for kept in ({"tokenizer_class": "Qwen2Tokenizer"}, {"auto_map": {"AutoTokenizer": ["o.O", None]}}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(kept))
        add_transformers4_names(tmp_path)
        assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == kept, "a custom class of the model"


# ---- URLs


def test_checkpoint_at_a_url_is_exported_and_leaves_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    model = checkpoints.llama()
    checkpoints.checkpoint_of(model, tmp_path / "c")
    fsspec.filesystem("memory").put(f"{tmp_path}/c/", "/exported/model/model/", recursive=True)
    for number, url in enumerate(("memory://exported/model/model/", f"file://{tmp_path}/c")):
        out = tmp_path / f"out{number}"
        assert cli.main(["export", url, str(out)]) == 0
        assert checkpoints.same_weights(loaded(out), model.state_dict())
    assert not list(temporary.iterdir())


def test_url_as_output_is_rejected(error_of: Callable[..., str]) -> None:
    """`test_run_folder.py` tests file names that would be written outside the download folder."""
    assert "memory://exported" in error_of("export", "c", "memory://exported")


# ---- memory


OTHER_WAYS = ("state bfloat16", "files", "files bfloat16", "merged")
# 42 million float32 weights, 168 MB; the embedding and each layer are a tenth
LARGE = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 9, "head_dim": 128}


@pytest.mark.parametrize("way", ["state", *(pytest.param(way, marks=pytest.mark.long) for way in OTHER_WAYS)])
def test_export_holds_the_model_at_most_once(way: str, tmp_path: Path) -> None:
    """Only allocated memory counts: the system can drop pages of mapped files."""
    kind, *dtype = way.split()
    model, folder = checkpoints.llama(**LARGE), tmp_path / "c"
    if kind == "files":
        model.save_pretrained(folder)
    elif kind == "merged":
        state_checkpoint(adapted(model, KINDS["lora"][1], tmp_path / "base"), folder)
    else:
        checkpoints.checkpoint_of(model, folder)
    subprocesses.run("export_memory.py", str(tmp_path), *dtype, USE_TORCH_XLA="0")
    measured = json.loads((tmp_path / "measured.json").read_text())
    largest, total = max(measured["files"]), sum(measured["files"])
    assert len(measured["files"]) >= 4 and total > 3 * largest
    assert measured["allocated"] <= total + 1.1 * largest


# ---- interruptions

KILLED = """
import os, signal, sys
from trl_tpu.checkpoint import export
export.add_transformers4_names = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # when all is written
export.export_checkpoint(*sys.argv[1:])
"""


def test_killed_export_leaves_no_folder_and_can_be_repeated(tmp_path: Path) -> None:
    """`tests/xla8/test_checkpoints.py` tests exports without torch_xla."""
    model = checkpoints.llama()
    checkpoint, out = checkpoints.checkpoint_of(model, tmp_path / "c"), tmp_path / "out"
    subprocesses.run("-c", KILLED, str(checkpoint), str(out), status=-signal.SIGKILL)
    assert not out.exists() and (tmp_path / "_unfinished" / "out").is_dir()
    export_checkpoint(checkpoint, out)
    assert checkpoints.same_weights(loaded(out), model.state_dict())
    assert not (tmp_path / "_unfinished").exists()


# ---- rejected exports


class Hostile:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle ran",))


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "state").mkdir()
    for name in ("pytorch_model.bin", "state/.metadata", "state/__0_0.distcp", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Hostile()))


def _truncated(folder: Path) -> None:
    reseal(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def _without_head(in_state: bool, folder: Path) -> None:
    """Write a checkpoint of a model without a score head, as weights or as state."""
    file = folder / "model.safetensors"
    backbone = {name: tensor for name, tensor in load_file(file).items() if "score" not in name}
    file.unlink()
    checkpoints.write_state(folder / "state", backbone) if in_state else save_file(backbone, file, {"format": "pt"})


def _part_missing(folder: Path) -> list[str]:
    """Remove a file of a state without a manifest, as in an interrupted copy."""
    (folder / "model.safetensors").unlink()
    checkpoints.write_state(folder / "state", checkpoints.llama().state_dict())
    (folder / "state" / "host-00000-device-000.safetensors").unlink()
    return ["--dtype", "bfloat16"]


def _existing(folder: Path) -> None:
    (folder.parent / "out").mkdir()
    (folder.parent / "out" / "mine").write_text("precious")


REFUSED: list[tuple[Callable[[Path], list[str] | None], str]] = [
    (lambda folder: ["--merge"], "adapter_config.json.*--merge"),
    (_existing, "out exists"),
    (_pickled, "safetensors"),
    (_truncated, "damaged: model.safetensors"),
    (_part_missing, "lacks shards of model"),
    (partial(_without_head, True), "model.score.weight"),
    (partial(_without_head, False), "score.weight"),
]


@pytest.mark.parametrize(("spoil", "name"), REFUSED)
def test_bad_checkpoints_are_rejected(spoil: Any, name: str, tmp_path: Path, error_of: Callable[..., str]) -> None:
    """A case may return additional words for the command."""
    checkpoints.llama().save_pretrained(tmp_path / "c")
    words = spoil(tmp_path / "c") or []
    before = sorted(tmp_path.rglob("*"))
    assert re.search(name, error_of("export", tmp_path / "c", tmp_path / "out", *words))
    assert sorted(tmp_path.rglob("*")) == before


# ---- adapters: as saved by peft, and merged into their base

LORA: dict[str, Any] = {"task_type": "SEQ_CLS", "r": 4, "init_lora_weights": False}
KINDS: dict[str, tuple[Callable[[], transformers.PreTrainedModel], peft.PeftConfig]] = {
    "lora": (checkpoints.llama, peft.LoraConfig(target_modules="all-linear", **LORA)),
    "rslora, biases": (
        lambda: checkpoints.llama(attention_bias=True),
        peft.LoraConfig(target_modules=["q_proj"], use_rslora=True, bias="all", alpha_pattern={"0.*": 3}, **LORA),
    ),
    "dora": (checkpoints.llama, peft.LoraConfig(target_modules=["q_proj", "up_proj"], use_dora=True, **LORA)),
    "embeddings": (checkpoints.llama, peft.LoraConfig(target_modules=["embed_tokens", "v_proj"], **LORA)),
    "added tokens": (checkpoints.llama, peft.LoraConfig(trainable_token_indices={"embed_tokens": [3, 60]}, **LORA)),
    "modules to save": (checkpoints.llama, peft.LoraConfig(modules_to_save=["score", "norm", "embed_tokens"], **LORA)),
    "experts": (
        checkpoints.experts,
        peft.LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"], **(LORA | {"r": 1})),
    ),
    "ia3": (checkpoints.llama, peft.IA3Config(task_type="SEQ_CLS", init_ia3_weights=False)),
}  # fmt: skip
QUERIES = LORA | {"target_modules": ["q_proj"]}


def adapted(base: transformers.PreTrainedModel, config: peft.PeftConfig, folder: Path) -> Any:
    """Return random adapters on a base model saved in a folder and read in float32."""
    base.save_pretrained(folder)
    read = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    result = peft.get_peft_model(read, config)
    for parameter in result.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)
    return result.eval()


def state_checkpoint(model: Any, folder: Path) -> Path:
    """Write a checkpoint of several hosts, with the adapters only in its state."""
    model.peft_config["default"].save_pretrained(folder)
    checkpoints.write_state(folder / "state", trained_weights(model))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_written_and_merged_as_by_peft(kind: str, tmp_path: Path) -> None:
    """The base is a language model without a reward head."""
    make, config = KINDS[kind]
    model = adapted(make(), config, tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "base")
    checkpoint, saved = state_checkpoint(model, tmp_path / "c"), tmp_path / "saved"
    model.save_pretrained(saved)
    expected = load_file(saved / "adapter_model.safetensors")
    for source, out in ((checkpoint, tmp_path / "from_state"), (saved, tmp_path / "from_files")):
        export_checkpoint(source, out)
        assert checkpoints.same_weights(load_file(out / "adapter_model.safetensors"), expected)
        again = peft.AutoPeftModelForSequenceClassification.from_pretrained(out, num_labels=1)
        assert checkpoints.same_weights(peft.get_peft_model_state_dict(again), peft.get_peft_model_state_dict(model))

    for source, out in ((checkpoint, tmp_path / "merged_state"), (saved, tmp_path / "merged_files")):
        export_checkpoint(source, out, merge=True, max_shard_size="20KB")
        assert not list(out.glob("adapter*")) and len(list(out.glob("*.safetensors"))) > 2
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", num_labels=1)
    for out in (tmp_path / "merged_state", tmp_path / "merged_files"):
        # peft does the same float32 operations
        assert checkpoints.same_weights(loaded(out), reference.state_dict())


def test_card_of_a_merged_model_names_its_base_model(tmp_path: Path) -> None:
    for card in ("---\nlicense: mit\n---\n# Mine\n", "# Without metadata\n", None):
        path = tmp_path / "README.md"
        path.unlink(missing_ok=True) if card is None else path.write_text(card)
        _name_base_in_card(path, "org/base")
        assert ModelCard.load(path).data.base_model == "org/base" and "`org/base`" in path.read_text()


def test_bfloat16_base_is_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    model = adapted(checkpoints.llama().bfloat16(), peft.LoraConfig(**QUERIES), tmp_path / "base")
    checkpoint = state_checkpoint(model, tmp_path / "c")
    export_checkpoint(checkpoint, tmp_path / "rounded", merge=True)
    export_checkpoint(checkpoint, tmp_path / "exact", merge=True, dtype=torch.float32)
    expected = model.merge_and_unload().state_dict()
    assert checkpoints.same_weights(load_file(tmp_path / "exact" / "model.safetensors"), expected)
    rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert checkpoints.same_weights(load_file(tmp_path / "rounded" / "model.safetensors"), rounded)


def test_adapters_with_more_tokens_than_their_base_are_merged(tmp_path: Path) -> None:
    """Training has added tokens, and the tokenizer's pad token."""
    tokenizer = tiny.tiny_tokenizer(["some text"])
    checkpoints.llama(vocab_size=len(tokenizer) - 2, pad_token_id=None).save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    base.resize_token_embeddings(len(tokenizer))
    model: Any = peft.get_peft_model(base, peft.LoraConfig(**QUERIES))
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "saved")
    export_checkpoint(tmp_path / "saved", tmp_path / "out", merge=True)
    assert checkpoints.same_weights(loaded(tmp_path / "out"), model.merge_and_unload().state_dict())
    assert AutoConfig.from_pretrained(tmp_path / "out").pad_token_id == tokenizer.pad_token_id


def test_missing_head_and_wrong_base_are_rejected(tmp_path: Path) -> None:
    checkpoints.llama(hidden_size=16).save_pretrained(tmp_path / "narrow")
    # without a task type the head is frozen and not saved
    model = adapted(checkpoints.llama(), peft.LoraConfig(r=2), tmp_path / "base")
    checkpoint = state_checkpoint(model, tmp_path / "c")
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="score.weight"):
        export_checkpoint(checkpoint, tmp_path / "out", merge=True)
    with pytest.raises(UserError, match="q_proj.lora_A"):
        export_checkpoint(checkpoint, tmp_path / "out", merge=True, base=str(tmp_path / "narrow"))
    assert not (tmp_path / "out").exists()


def test_value_beyond_float16_is_rejected(tmp_path: Path) -> None:
    """The value is in the adapters, or results from merging them."""
    model = adapted(checkpoints.llama(), peft.LoraConfig(**QUERIES), tmp_path / "base")
    for parameter in model.parameters():
        parameter.data.fill_(300)  # the product of two such weights exceeds float16
    checkpoint = state_checkpoint(model, tmp_path / "c")
    export_checkpoint(checkpoint, tmp_path / "adapters", dtype=torch.float16)
    with pytest.raises(UserError, match="q_proj.weight.*--dtype"):
        export_checkpoint(checkpoint, tmp_path / "out", merge=True, dtype=torch.float16)
    model.score.weight.data[:] = 1e5
    shutil.rmtree(checkpoint)
    with pytest.raises(UserError, match="score.weight.*--dtype"):
        export_checkpoint(state_checkpoint(model, checkpoint), tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
