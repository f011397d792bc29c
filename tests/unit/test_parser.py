"""TrlParser reads flags and YAML as TRL's parser does, and rejects unreadable input with clear errors."""

import argparse
import copy
import dataclasses
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import trl
from trl.scripts.utils import TrlParser as ReferenceParser

from trl_tpu.config.reward_config import RewardConfig
from trl_tpu.scripts.parser import TrlParser
from trl_tpu.scripts.score import ScoreArguments
from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments
from trl_tpu.trainer.model_config import ModelConfig

TRL_TYPES = (trl.ScriptArguments, trl.RewardConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
OUR_TYPES = (ScriptArguments, RewardConfig, ModelConfig, DatasetMixtureConfig)
WORDS = ("none", "NULL", "5", "0.5", "-1", "true", "no", "abc", "", '{"a": 1}', "auto", "steps")


@dataclass
class Arguments:
    steps: int
    name: str = "default"
    rate: float | None = 0.5
    size: int | str | None = None
    quiet: bool | None = None
    mode: Literal["fast", "slow"] = "fast"
    when: str = field(default="no", metadata={"choices": ["no", "steps"]})
    extra: dict[str, Any] | None = None
    names: list[str] | None = None
    sizes: list[int] | None = None
    options: dict[str, Any] | str | None = None
    report: None | str | list[str] = None
    loud: bool = True


def config_file(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "config.yaml").write_text(text)
    return ["--config", str(tmp_path / "config.yaml")]


def parsed(*words: str) -> Any:
    return TrlParser(Arguments).parse_args_and_config(words)[0]


def flags(parser: argparse.ArgumentParser) -> dict[tuple[str, ...], argparse.Action]:
    return {tuple(action.option_strings): action for action in parser._actions}


def converted(action: argparse.Action, word: str) -> Any:
    try:
        return action.type(word) if callable(action.type) else word
    except Exception as error:
        return type(error)


def test_every_trl_reward_flag_parses_as_in_trl() -> None:
    ours, theirs = flags(TrlParser(TRL_TYPES)), flags(ReferenceParser(TRL_TYPES))
    assert ours.keys() == theirs.keys() and len(ours) > 100
    for name, action in ours.items():
        reference = theirs[name]
        for attribute in ("dest", "nargs", "const", "default", "choices", "required"):
            assert getattr(action, attribute) == getattr(reference, attribute), (name, attribute)
        if action.dest == "liger_kernel_config":  # a dict field: TRL's flag for it accepts no dict
            assert (converted(action, '{"a": 1}'), converted(reference, '{"a": 1}')) == ({"a": 1}, ValueError)
        else:
            assert [converted(action, w) for w in WORDS] == [converted(reference, w) for w in WORDS], name


COMMAND_LINES = [
    ["--max_length", "none", "--lora_target_modules", "q_proj", "v_proj", "--use_peft", "--no_disable_dropout"],
    ["--model_init_kwargs", '{"dtype": "bfloat16"}', "--lora_target_modules", "all-linear", "--eval_steps", "7"],
    ["--pad_to_multiple_of", "none", "--fp16", "true", "--eval_strategy", "steps", "--logging_steps", "0.5"],
    ["--logging_steps", "0"],
    ["--load_in_4bit", "--load_in_8bit"],
]


@pytest.mark.parametrize("words", COMMAND_LINES)
def test_command_line_gives_trls_values(words: list[str]) -> None:
    """Flags with different defaults in TRL are set explicitly: precision, optimizer, LoRA task type and bars."""

    def values(parser: Any) -> list[dict[str, str]]:
        alike = ["--bf16", "false", "--use_cpu", "--optim", "adamw_torch_fused", "--lora_task_type", "SEQ_CLS"]
        alike += ["--disable_tqdm", "false"]
        try:
            made = parser.parse_args_and_config([*alike, *words])
        except ValueError:
            return []
        return [{name: str(value) for name, value in vars(each).items() if "_state" not in name} for each in made]

    ours, theirs = values(TrlParser(OUR_TYPES)), values(ReferenceParser(TRL_TYPES))
    assert [mine | other for mine, other in zip(ours, theirs, strict=True)] == ours


def test_command_line_overrides_yaml_and_yaml_overrides_defaults(tmp_path: Path) -> None:
    words = config_file(tmp_path, "steps: 3\nname: yaml\nrate: null\n")
    args = parsed(*words, "--name", "flag")
    assert (args.steps, args.name, args.rate, args.mode) == (3, "flag", None, "fast")
    args = parsed(f"--config={words[1]}", "--steps", "4")
    assert (args.steps, args.name) == (4, "yaml")
    parser = TrlParser()
    subparsers = parser.add_subparsers(dest="command", parser_class=TrlParser)
    for command in ("one", "two"):
        subparsers.add_parser(command, dataclass_types=[Arguments])
    for command in ("one", "two"):
        (args,) = parser.parse_args_and_config([command, *words, "--name", command])
        assert (args.steps, args.name) == (3, command)


def test_wrong_value_exits_with_one_line_and_dataclass_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    before = {field.name: field.type for field in dataclasses.fields(Arguments)}
    assert parsed("--steps", "1", "--extra", '{"a": {"b": 1.5}}').extra == {"a": {"b": 1.5}}
    for flag, word in (("--extra", "{broken"), ("--steps", "many")):
        with pytest.raises(SystemExit) as ended:
            parsed("--steps", "1", flag, word)
        assert ended.value.code == 2 and flag in capsys.readouterr().err.splitlines()[0]
    assert {field.name: field.type for field in dataclasses.fields(Arguments)} == before


def test_yaml_and_remaining_words_are_read_as_by_trl_or_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--rat3=1"):
        parsed("--steps", "1", "--rat3=1")
    with pytest.raises(ValueError, match="'config'"):
        TrlParser([dataclasses.make_dataclass("Taken", [("config", str, "")])])
    yaml = "steps: 3\nrate: 1e-4\nextra: {a: [1, 2]}\nnames: [x, y]\nsize: none\nquiet: true\nother: 2\n"
    words = config_file(tmp_path, yaml)
    assert len(TrlParser(Arguments).parse_args_and_config(words, fail_with_unknown_args=False)) == 1
    for separate in (False, True):
        how = {"return_remaining_strings": True, "separate_remaining_strings": separate}
        kinds = (TrlParser, ReferenceParser)
        ours, theirs = (kind(Arguments).parse_args_and_config([*words, "--more", "3"], **how) for kind in kinds)
        assert ours == theirs


INVALID_YAML = [
    ("- 1\n- 2\n", "config.yaml"),
    ("", "config.yaml"),
    ("seed:\n\t- 1", "config.yaml.*line 2, column 1"),
    ("steps: 1\nsteps: 2", "'steps'.*line 2, column 1"),
    ("env: text\nsteps: 1", "`env`"),
    ("steps: 1\nenv: {A: [b]}", "`env`"),
    ("steps: 1\nenv: {A: b, A: c}", "'A'"),
    ("steps: 1\nextra: {a: 1, a: 2}", "'a'"),
    ("steps: 1\nmode: quick", "`mode: quick`.*fast, slow"),
    ("steps: !!python/object/apply:os.getcwd []", "constructor"),
    ("steps: 1\nnmae: x\nzzzz: 2\n", "--nmae x --zzzz 2"),
]


@pytest.mark.parametrize(("text", "name"), INVALID_YAML)
def test_invalid_yaml_is_rejected(text: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        parsed(*config_file(tmp_path, text))


YAML_VALUES = [
    *((f"name: {word}", word) for word in ("2024", "1.10", "010", "12:30", "no", "On", "2001-01-01")),
    *(("steps: 010", 10), ("steps: 1_000", 1000), ("rate: 1e-5", 1e-5), ("rate: .5", 0.5), ("rate: null", None)),
    *(("rate: none", None), ("loud: off", False), ("loud: No", False), ("quiet: on", True), ("quiet: true", True)),
    *(("names: [1.10, on, a, 010]", ["1.10", "on", "a", "010"]), ("sizes: [1_0, 2]", [10, 2])),
    *(("report: [a, 1.10]", ["a", "1.10"]), ("report: 1.10", "1.10"), ("extra: {rate: 1e-5}", {"rate": 1e-5})),
    *(("options: {a: {b: no}}", {"a": {"b": False}}), ("when: no", "no"), ("mode: slow", "slow")),
    *(("rate: &rate 1e-5\nextra: {rate: *rate}", 1e-5), ("extra: {<<: {a: 1}, a: 2}", {"a": 2})),
]


@pytest.mark.parametrize(("line", "value"), YAML_VALUES)
def test_yaml_values_are_read_by_the_type_of_their_flag(line: str, value: Any, tmp_path: Path) -> None:
    args = parsed(*config_file(tmp_path, line if line.startswith("steps") else f"steps: 1\n{line}"))
    field_value = getattr(args, line.partition(":")[0])
    assert field_value == value and type(field_value) is type(value)
    assert "*rate" not in line or args.extra == {"rate": 1e-5}


def test_env_variables_are_exported_verbatim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = {"A": "true", "B": "010", "C": "12:30", "D": "on", "E": "1.10", "F": "", "G": "2001-01-01"}
    for name in written:
        monkeypatch.setenv(f"TRL_TPU_TEST_{name}", "before")
    lines = "\n".join(f"  TRL_TPU_TEST_{name}: {value or repr(value)}" for name, value in written.items())
    parsed(*config_file(tmp_path, f"steps: 1\nenv:\n{lines}"))
    assert {name: os.environ[f"TRL_TPU_TEST_{name}"] for name in written} == written


# ---- config fields: described once, in the docstring; copies and pickles


@pytest.mark.parametrize("config", [RewardConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig, ScoreArguments])
def test_help_of_every_field_comes_from_the_docstring(config: Any) -> None:
    described = " ".join(config.__doc__.split())
    own = [each for each in dataclasses.fields(config) if each.name in config.__annotations__]
    assert own
    for each in own:
        assert len(each.metadata["help"]) > 10 and each.metadata["help"] in described, each.name


def test_config_copies_keep_the_hub_token_and_pickles_drop_it(tmp_path: Path) -> None:
    args = RewardConfig(str(tmp_path), bf16=False, report_to="none", hub_token="secret", packing=True)
    args.model_init_kwargs = {"token": "secret", "dtype": "float32"}
    for copied in (copy.copy(args), copy.deepcopy(args)):
        assert copied.hub_token == "secret" and copied.model_init_kwargs == args.model_init_kwargs
    assert b"secret" not in pickle.dumps(args) and "secret" not in args.to_json_string()
    assert "secret" not in str(args.to_sanitized_dict()) and args.model_init_kwargs["token"] == "secret"
    unpickled = pickle.loads(pickle.dumps(args))
    assert (unpickled.hub_token, unpickled.packing) == (None, "true")
