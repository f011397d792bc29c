"""Finds, verifies and reads checkpoints."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState
from transformers.dynamic_module_utils import get_relative_imports
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME

from ..errors import UserError
from ..modeling.outputs import BASE_CONFIG
from ..runtime import Runtime
from .manifest import check_given, find_faults, newest_good
from .run_folder import RunFolder, local_copy
from .saver import Processes, together
from .state_dict import has_weights, read_optimizer, read_progress, read_scheduler, read_torch_optimizer, read_weights

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
#: the vocabularies are those of transformers' tokenizers
_COMPANIONS = (
    *("config.json", BASE_CONFIG, "generation_config.json", "*processor_config.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("vocab.txt", "vocab*.json", "*_vocab.json", "merges.txt", "dict.txt", "bpe.codes", "byte_maps.json"),
    *("emoji.json", "normalizer.json", "tekken.json", "word_shape.json", "word_pronunciation.json"),
    *("*.model", "*.spm", "*.tiktoken", "*.tokenizer"),
    *("README.md", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)


def companions(folder: Path) -> list[str]:
    """Return the names of the files that go with a model's weights: configs, tokenizer, templates, card, its own code.

    Raises:
        UserError: One is a link or no file, or a config is broken.
    """
    found = [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]
    names = [path.relative_to(folder).as_posix() for path in found if not path.is_dir()]
    names = [name for name in names if any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)]
    check_regular(folder, names)
    return sorted({*names, *_own_code(folder, [name for name in names if name.endswith("config.json")])})


def check_regular(folder: Path, names: Iterable[str]) -> None:
    """Refuse files that would bring others with them: what links lead to is not part of the folder.

    Raises:
        UserError: One of ``names`` in ``folder`` is, or is reached by, a link; or it is no file.
    """
    root = os.path.realpath(folder)
    for name in names:
        path = folder / name
        if os.path.realpath(path) != os.path.join(root, name) or not path.is_file():
            raise UserError(
                f"{path} is a link or no regular file, and neither is exported. If it is meant to be part of the "
                f"model, put a copy in its place: cp -rL {folder} NEW_FOLDER"
            )


def read_config(path: Path) -> dict[str, Any]:
    """Return what is in a JSON file of settings.

    Raises:
        UserError: It is torn, or something else.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is broken: {error}. Copy or download it again.") from error


def _own_code(folder: Path, configs: Iterable[str]) -> set[str]:
    """Return the names of the files of code that ``configs`` name in their ``auto_map``, and of what those import."""
    found: set[str] = set()
    waiting: list[str] = []
    for name in configs:
        for each in (read_config(folder / name).get("auto_map") or {}).values():
            # of a tokenizer, the slow class and the fast one, or None
            waiting += [str(name).partition(".")[0] for name in (each if isinstance(each, list) else [each])]
    while waiting:
        module = waiting.pop()
        # the code of another repository is `owner/name--module`, and what is missing here is for its reader to say
        if module.isidentifier() and os.path.lexists(folder / f"{module}.py") and f"{module}.py" not in found:
            check_regular(folder, [f"{module}.py"])
            found.add(f"{module}.py")
            waiting += get_relative_imports(folder / f"{module}.py")
    return found


class CheckpointLoader:
    """Finds a whole checkpoint, and loads it; never starts anew in silence.

    Args:
        runtime: Of the tensors.
        processes: All that train.
        shares_disk: Whether all processes see the same folder.
    """

    def __init__(self, runtime: Runtime, processes: Processes, *, shares_disk: bool) -> None:
        self._runtime, self._processes, self._shares_disk = runtime, processes, shares_disk
        self._download = ExitStack()  # has the copy of a checkpoint from a URL
        self.progress: dict[str, Any] | None = None
        """What our part of the checkpoint says that training resumes from; None for one of another trainer."""
        self.folder: str | None = None
        """Where this is on this host."""
        self.place: str | None = None
        """Where this was asked for: a folder or URL."""

    def find(self, asked: str | bool | None, run: RunFolder, layout: str, order: Mapping[str, Any]) -> str | None:
        """Return the folder of the checkpoint that ``resume_from_checkpoint`` means, whose files are whole.

        Args:
            asked: ``resume_from_checkpoint``; True for the newest of the run's folder.
            run: The run's folder.
            layout: How batches are laid out, "packed" or "padded", which a resumed run must not change.
            order: What each step depends on; a warning names what has changed, and the new values hold.

        Raises:
            UserError: None is whole, or the one given by name is damaged or of other batches.
        """
        self.progress = self.folder = self.place = None
        if asked is None or asked is False:
            return None
        if asked is True:
            if run.began_without_a_checkpoint:
                logger.warning("The run in %s has saved no checkpoint yet: it begins anew.", run.path)
                return None
            folder = newest_good((self._local(run.place_of(name)) for name in run.checkpoints()), self._examine)
            self.place = run.place_of(Path(folder).name)
        else:
            self.place = os.fspath(asked)
            check_given(folder := self._local(self.place), self._examine)
        self.folder, self.progress = folder, read_progress(folder)
        if self.progress is not None:
            if (before := self.progress["batches"]) != layout:
                raise UserError(
                    f"The checkpoint {folder} was trained on {before} batches, and these are {layout}: the run would "
                    "not go on to the bit. Resume with the `packing` it had, or start from its weights: give its "
                    "folder as the model."
                )
            then, now = self.progress["order"], json.loads(json.dumps(order))
            if now.get("attributes") != then.get("attributes", now.get("attributes")):
                raise UserError(
                    f"The checkpoint {folder} has outputs for attributes={then['attributes']}, and this run for "
                    f"attributes={now['attributes']}. Resume with the attributes that it had, in that order."
                )
            changed = [name for name in now if name in then and then[name] != now[name]]
            if told := ", ".join(f"{name} was {then[name]} and is {now[name]}" for name in changed):
                logger.warning("Resuming from %s, but the run will not be the one that it is of: %s.", folder, told)
        return folder

    def state(self) -> TrainerState:
        """Return transformers' state of the run that is resumed; an empty one where none is."""
        if self.folder is None:
            return TrainerState()
        return TrainerState.load_from_json(str(Path(self.folder, TRAINER_STATE_NAME)))

    def best_so_far(self, run: RunFolder) -> str | None:
        """Return where the best checkpoint of the run that is resumed is now; None where there is none.

        It is beside the checkpoint that is resumed, in the run's folder (or at its URL), or where it was saved.
        """
        recorded = self.state().best_model_checkpoint
        if self.folder is None or recorded is None:
            return None
        name = Path(recorded).name
        places = [Path(self.folder).with_name(name), run.path / name, Path(recorded)]
        best = next((place for place in places if place.is_dir()), run.path / name)
        if run.remote is None and not best.is_dir():
            logger.warning("The best checkpoint so far, %s, is not there any more.", best)
        return str(best)

    def load_weights(self, model: nn.Module, checkpoint: str) -> bool:
        """Load weights that our checkpoints hold; False, and none, where transformers has to: it loads no parts."""
        if not (has_weights(checkpoint) or self._runtime.spreads_model):
            return False
        read_weights(model, checkpoint, self._runtime)
        return True

    def find_best(self, best: str, run: RunFolder) -> tuple[str, list[str]]:
        """Return the folder of the best checkpoint, which may be at the run's URL, and what is wrong with it."""
        try:
            if run.remote is not None:
                best = self._local(run.place_of(Path(best).name))
            faults = find_faults(best, self._share)
        except Exception as error:  # file systems of fsspec say it in errors of many kinds
            faults = [str(error)]
        return best, [fault for said in self._processes.all_gather_object(faults) for fault in said]

    def load_optimizer(self, model: nn.Module, optimizer: Any, scheduler: Any, checkpoint: str) -> bool:
        """Load the optimizer's state and the schedule's place; False where transformers has to."""
        if self.progress is not None:
            read_optimizer(optimizer, model, checkpoint, self.progress["optimizer"], self._runtime)
            read_scheduler(scheduler, checkpoint)
            return True
        if not Path(checkpoint, OPTIMIZER_NAME).is_file():
            logger.warning(
                "The checkpoint %s has no state of the optimizer (was it saved with `save_only_model`?), so its "
                "moments and the learning rate's schedule begin anew.",
                checkpoint,
            )
        elif self._runtime.shares_mesh:
            read_torch_optimizer(optimizer, scheduler, checkpoint, self._runtime)
        elif self._runtime.spreads_model:
            raise UserError(
                f"The checkpoint {checkpoint} is another trainer's, whose optimizer has its state whole, and here "
                "processes have parts. Resume it in one process without a mesh first, and go on from what that saves."
            )
        return self._runtime.shares_mesh

    def drop_download(self) -> None:
        """Remove the copy of a checkpoint that has been read."""
        self._download.close()

    def _examine(self, folder: str) -> list[str]:
        """Return what is wrong with a checkpoint, in all processes."""
        gathered = self._processes.all_gather_object(find_faults(folder, self._share))
        return [fault for said in gathered for fault in said]

    @property
    def _share(self) -> tuple[int, int]:
        """Which part of a checkpoint's files this process looks at, and of how many."""
        return (self._processes.index, self._processes.count) if self._shares_disk else (0, 1)

    def _local(self, checkpoint: str) -> str:
        """Return a folder of this host with the files of a checkpoint, which may be at a URL.

        The first rank of each host downloads it for all of them. Ranks of one host are neighbors.
        """
        self.drop_download()
        gather, leads = self._processes.all_gather_object, self._processes.is_first_of_host
        copy = local_copy(checkpoint) if leads else nullcontext()
        folders = gather(together(lambda: self._download.enter_context(copy), gather))
        return str([folder for folder in folders[: self._processes.index + 1] if folder is not None][-1])
