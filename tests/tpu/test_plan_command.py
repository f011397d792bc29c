"""``trl-tpu plan`` with the real compiler."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import subprocesses
from environment import EXAMPLES
from subprocesses import PARALLEL_COMPILES
from transformers import AutoConfig

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}


def planned(words: list[str]) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PJRT", "CPU_NUM", "USE_"))}
    return subprocesses.run_without_server(
        "-m", "trl_tpu.cli", "plan", "--report_to", "none", *words, environment=environment
    )


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[str]]]:
    folder = tmp_path_factory.mktemp("model")
    AutoConfig.for_model("llama", num_attention_heads=4, num_key_value_heads=2, **SIZES).save_pretrained(folder)
    commands = {
        "small": f"--model_name_or_path {folder} --topology v6e:2x2 --row_length 256 --per_device_train_batch_size 1",
        "data": f"--config {EXAMPLES / 'quickstart.yaml'} --topology v5e:2x2",
    }
    with ThreadPoolExecutor(PARALLEL_COMPILES) as pool:
        yield {name: pool.submit(planned, command.split()) for name, command in commands.items()}


def test_config_without_data_is_planned(plans: Mapping[str, Future[str]]) -> None:
    said = plans["small"].result()
    assert "IT FITS" in said and "limited by" in said and "received at 400 GB/s" in said


def test_training_data_is_planned_in_the_trainers_rows(plans: Mapping[str, Future[str]]) -> None:
    said = plans["data"].result()
    assert "128 rows of the data, mostly in 28 token rows of 64" in said
    assert "2,048 rows of 15 unique tokens, 15 at most" in said
