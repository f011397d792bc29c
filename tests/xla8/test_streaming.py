"""Weights are streamed from the checkpoint to their shards one at a time, unchanged, and so are batches."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import tiny
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast, set_seed

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.state_dict import gather_full_weights
from trl_tpu.data.loader import skip_batches
from trl_tpu.modeling.load import clone_chat_template
from trl_tpu.parallel.mesh import BATCH_AXES

# ---- host memory


WIDTH: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
LARGE = {  # about 100 million weights each; two thirds of Gemma's are tied embeddings
    "llama": WIDTH | {"vocab_size": 4096, "intermediate_size": 4096, "num_hidden_layers": 6},
    "gemma3_text": WIDTH | {"vocab_size": 65536, "intermediate_size": 2048, "num_hidden_layers": 4, "head_dim": 128},
}


@pytest.fixture(scope="module", params=LARGE)
def large_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a language model in bfloat16, to be read as float32."""
    folder = tmp_path_factory.mktemp("large")
    config = transformers.AutoConfig.for_model(request.param, pad_token_id=0, **LARGE[request.param])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    model.save_pretrained(folder)
    return str(folder)


def test_host_holds_one_tensor_at_a_time(large_model: str, tmp_path: Path) -> None:
    """Other memory is the tensor's unconverted copy, half its size, and Python's own allocations."""
    subprocesses.run("host_memory.py", large_model, str(tmp_path / "out.json"))
    streamed = json.loads((tmp_path / "out.json").read_text())
    assert streamed["largest"] < streamed["model"]
    assert 0.9 * streamed["largest"] < streamed["held"] < 2 * streamed["largest"]


# ---- values


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.tiny_tokenizer(tiny.made_up_pairs(200))


@pytest.fixture(params=["llama in bfloat16", "experts one by one"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a language model's checkpoint without a reward head, with experts as separate weights."""
    set_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": tokenizer.pad_token_id}
    sizes["vocab_size"] = len(tokenizer) + -len(tokenizer) % 8
    if request.param == "llama in bfloat16":
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(tmp_path)
    else:
        config = transformers.Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **sizes)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
        assert any("experts.3.up_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def read_by_transformers(checkpoint: str, seed: int) -> PreTrainedModel:
    set_seed(seed)
    return AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1, dtype=torch.float32)


def test_streamed_weights_equal_transformers(checkpoint: str, config: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Weights are bitwise equal, also renamed and merged ones and the new reward head of the same seed."""
    args = config(mesh="data=2,fsdp=2,tensor=2")
    trainer = RewardTrainer(checkpoint, args, train_dataset=tiny.made_up_pairs(8))
    are_merged = "num_experts" in Path(checkpoint, "config.json").read_text()
    assert ("into host memory as a whole" in caplog.text) == are_merged
    streamed = gather_full_weights(trainer.model, trainer.trl_tpu.runtime, keeps=True)
    expected = read_by_transformers(checkpoint, args.seed).state_dict()
    assert streamed.keys() == expected.keys()
    for name, weight in expected.items():
        assert weight.dtype == streamed[name].dtype == torch.float32
        assert torch.equal(streamed[name], weight), name
    assert trainer.shard_report is not None
    for name, parameter in trainer.model.named_parameters():
        parts = trainer.shard_report.placements[name].parts(args.mesh_shape)
        shards = xs.wrap_if_sharded(parameter.detach()).local_shards
        assert [shard.data.numel() for shard in shards] == [parameter.numel() // parts] * 8, name


def test_enlarged_embeddings_equal_unstreamed(checkpoint: str, tokenizer: Any, config: Any, tmp_path: Any) -> None:
    source = copy.deepcopy(tokenizer)
    source.add_tokens(["<|turn|>", "<|over|>"], special_tokens=True)
    source.save_pretrained(tmp_path / "source")
    args = config(mesh="fsdp=4,tensor=2", chat_template_path=str(tmp_path / "source"))
    trainer = RewardTrainer(checkpoint, args, train_dataset=tiny.made_up_pairs(8))
    streamed = gather_full_weights(trainer.model, trainer.trl_tpu.runtime, keeps=True)
    read = read_by_transformers(checkpoint, args.seed)
    rows = read.get_input_embeddings().weight.shape[0]
    clone_chat_template(read, copy.deepcopy(tokenizer), str(tmp_path / "source"))
    assert read.get_input_embeddings().weight.shape[0] > rows
    for name, weight in read.state_dict().items():
        assert torch.equal(streamed[name], weight), name


def test_unstreamed_model_is_placed_equally(checkpoint: str, config: Any) -> None:
    model = read_by_transformers(checkpoint, 0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = RewardTrainer(model, config(mesh="fsdp=4,tensor=2"), train_dataset=tiny.made_up_pairs(8))
    assert trainer.model is model
    assert {parameter.device.type for parameter in model.parameters()} == {"xla"}
    after = gather_full_weights(model, trainer.trl_tpu.runtime, keeps=True)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


# ---- batches. `test_layouts.py` checks the shards of weights, gradients and optimizer state


def bytes_on_a_device(tensor: torch.Tensor) -> int:
    if not torch_xla._XLAC._get_xla_sharding_spec(tensor):
        return tensor.numel() * tensor.element_size()
    return max(shard.data.numel() * shard.data.element_size() for shard in xs.wrap_if_sharded(tensor).local_shards)


@pytest.mark.parametrize("packing", [True, False])
def test_batches_arrive_sharded_over_the_devices(config: Any, model_folder: str, packing: bool) -> None:
    """Also after skipped batches, as in a resumed run."""
    trainer = RewardTrainer(model_folder, config(packing=packing), train_dataset=tiny.made_up_pairs(40))
    loader = trainer.get_train_dataloader()
    skipped = type(loader)(trainer.trl_tpu.runtime, skip_batches(loader.batches, 2), BATCH_AXES)
    for batches in (loader, skipped):
        for batch in batches:
            for part in batch.parts:
                for key, value in part.tensors().items():
                    whole = value.numel() * value.element_size()
                    assert bytes_on_a_device(value) == (whole if value.dim() == 1 else whole // 8), key
    assert len(skipped) == len(loader) - 2


def test_batch_indivisible_by_the_mesh_is_rejected(config: Any, model_folder: str) -> None:
    """With split_batches the batch size counts all devices together."""
    args = config(per_device_train_batch_size=12, accelerator_config={"split_batches": True})
    with pytest.raises(ValueError, match=r"12 / 8"):
        RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(40))
