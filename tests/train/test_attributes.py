"""Training on answers graded by several attributes: the saved model gives one reward and keeps attribute names."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from label_formats import NAMES, WEIGHTS, graded
from peft import AutoPeftModelForSequenceClassification, LoraConfig
from training import QUIET
from transformers import AutoModelForSequenceClassification

from trl_tpu import RewardConfig, RewardTrainer, score
from trl_tpu.checkpoint.export import export_checkpoint
from trl_tpu.errors import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_tiny(tmp_path_factory.mktemp("model"), graded(20), num_labels=3)


def trained(model: str, out: Path, peft_config: Any = None, **settings: Any) -> RewardTrainer:
    defaults = QUIET | {"save_strategy": "no", "max_steps": 4, "learning_rate": 1e-3, "ties": "skip"}
    defaults |= {"per_device_train_batch_size": 5, "attributes": NAMES, "attribute_weights": WEIGHTS}
    data = {"train_dataset": graded(23), "eval_dataset": graded(7, seed=3)}
    trainer = RewardTrainer(model, RewardConfig(str(out), **defaults | settings), **data, peft_config=peft_config)
    trainer.train()
    return trainer


@pytest.mark.parametrize("peft", [None, LoraConfig(task_type="SEQ_CLS", r=2)])
def test_saved_model_gives_one_reward(model: str, tmp_path: Path, peft: Any) -> None:
    run = trained(model, tmp_path / "run", peft_config=peft, save_strategy="steps", save_steps=4)
    saved, rows = tmp_path / "run" / "checkpoint-4", list(graded(5, seed=1))
    texts = [row["prompt"] + text for row in rows for text in row["completions"]]
    run.save_model(str(tmp_path / "saved"))
    scored = list(score(str(tmp_path / "saved"), rows))
    found = [reward for row in scored for reward in row["rewards"]]
    for source, out in ((saved, "of-checkpoint"), (tmp_path / "saved", "of-model")):
        export_checkpoint(source, tmp_path / out, merge=peft is not None)
        assert tiny.rewards_alone(tmp_path / out, texts) == pytest.approx(found, abs=2e-6)
    by_name = [each for row in scored for each in row["rewards_by_attribute"]]
    assert [list(each) for each in by_name] == [NAMES] * len(texts)
    assert [np.dot(WEIGHTS, list(each.values())) for each in by_name] == pytest.approx(found)
    assert np.std(found) > 0 and "0.65" in Path(run.args.output_dir, "README.md").read_text()


@pytest.mark.parametrize("lora", [None, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])])
def test_further_training_matches_attributes_by_name(model: str, tmp_path: Path, lora: Any) -> None:
    """Names come in another order. Adapters are loaded by their folder and by peft."""
    first = trained(model, tmp_path / "first", peft_config=lora, save_strategy="steps", save_steps=2)
    first.save_model()
    folder, before = str(tmp_path / "first"), first.evaluate()
    tokenizer = first.processing_class
    names = [NAMES[2], NAMES[0], NAMES[1]]
    auto: Any = AutoModelForSequenceClassification if lora is None else AutoPeftModelForSequenceClassification
    settings = QUIET | {"ties": "skip"}
    settings |= {"attributes": names, "attribute_loss_weights": [3.0, 1.0, 2.0]}
    args = RewardConfig(str(tmp_path / "again"), **settings)
    for given in (folder, auto.from_pretrained(folder, num_labels=3)):
        data = {"train_dataset": graded(23), "eval_dataset": graded(7, seed=3)}
        again = RewardTrainer(given, args, **data, processing_class=tokenizer)
        config = again.model.config
        assert (config.attribute_weights, [*config.id2label.values()]) == (WEIGHTS, NAMES)
        assert again.args.attribute_loss_weights == [1.0, 2.0, 3.0] and args.attributes == names
        metrics = again.evaluate()
        for key in (key for key in before if "accuracy" in key):
            assert metrics[key] == pytest.approx(before[key], abs=1e-6), key
    args.attributes = [*NAMES[:2], "other"]
    with pytest.raises(UserError, match="attributes"):
        RewardTrainer(folder, args, **data, processing_class=tokenizer)
    resumed = {"attributes": names, "attribute_weights": None, "max_steps": 6}
    with pytest.raises(UserError, match="attributes"):
        RewardTrainer(
            model, RewardConfig(str(tmp_path / "new"), **settings | resumed), **data, peft_config=lora
        ).train(f"{folder}/checkpoint-2")
