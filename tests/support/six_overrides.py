"""A trainer of which a user has overridden six methods, as of TRL's or of this package's."""

from typing import Any

import torch
from torch.utils.data import SequentialSampler


def six_overrides(package: Any) -> type:
    """The class, which leaves a trace of each method in what it logs."""

    class Own(package.RewardTrainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            metrics = self._metrics["train" if self.model.training else "eval"]
            accuracy = self.accelerator.gather_for_metrics(torch.tensor(metrics["accuracy"][-1])).mean().item()
            metrics["error"].append(1 - accuracy)
            loss = loss + 0.1 * outputs.logits.float().square().mean()
            return (loss, outputs) if return_outputs else loss

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, logits, labels = super().prediction_step(*args, **kwargs)
            return 2 * loss, logits, labels

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            if "loss" in logs:
                logs["twice"] = 2 * logs["loss"]
            super().log(logs, start_time)

        def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
            if "chosen_ids" not in dataset.column_names:
                dataset = dataset.filter(lambda row: len(row["rejected"]) > 200)
            prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
            return prepared.select(range(len(prepared) // 8 * 8))

        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def create_optimizer(self, *args: Any) -> Any:
            optimizer = super().create_optimizer(*args)
            optimizer.param_groups[0]["weight_decay"] = 0.1
            return optimizer

    return Own
