"""Commands and snippets of the README and the guides run, with tiny models in place of large ones.

Pages run in random order in one folder, which resembles a checkout: none may change files of another. Shell blocks run
in a real shell, which passes ``trl-tpu`` to this process to avoid slow imports; ``python``, and ``trl-tpu`` with
PJRT_DEVICE set, run in forks. Blocks that cannot run here are marked ``no-run``, and the commands' parsers check their
flags.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import io
import os
import random
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import model_families
import pytest
import subprocesses
import yaml
from datasets import Dataset
from environment import EXAMPLES, ROOT
from recent_families import DECODERS, HYBRIDS, WITH_CLASS
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl_tpu import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, cli
from trl_tpu.compat import arguments
from trl_tpu.errors import UserError, UserTypeError
from trl_tpu.experimental.prm import PRMConfig
from trl_tpu.modeling.packability import PROVEN_TYPES
from trl_tpu.parallel.mesh import Rules
from trl_tpu.scripts import export, plan, report, reward, score, synthetic

GUIDES = EXAMPLES / "guides"
PAGES = [ROOT / "README.md", *sorted(GUIDES.glob("*.md")), EXAMPLES / "recipes" / "README.md"]
NOT_RUN = "# not run by the tests: "
BLOCK = re.compile(r"^```(\w+)( no-run)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAKE_PARSER: dict[str, Any] = {
    each.__name__.rpartition(".")[2]: each.make_parser for each in (reward, score, export, plan, report)
}
MAKE_PARSER["prm"] = partial(reward.make_parser, config=PRMConfig)
FLAGS = {option for make in MAKE_PARSER.values() for each in make()._actions for option in each.option_strings}
#: Introductory pages. Each of their Python blocks runs on its own.
ON_THEIR_OWN = ("README.md", "examples/guides/first_reward_model.md")
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
#: Pages about the code. Their names must exist in it.
FOR_DEVELOPERS = ("how_this_package_is_built", "add_a_model_family", "contributing")

# sends the command to this process over two inherited pipes and prints the reply
ASKS = """#!/bin/bash
printf '%s\\x1f' "${0##*/}" "$PJRT_DEVICE" "$CPU_NUM_DEVICES" "$@" >&"$ASK"
printf '\\n' >&"$ASK"
read -r status <&"$ANSWER"
cat "$SAID"
exit "$status"
"""
PROGRAMS = {
    "trl-tpu": ASKS,
    "python": ASKS,
    "make": '#!/bin/bash\nexec /usr/bin/make --dry-run --silent "$@" > /dev/null\n',
}


# ---- pages: blocks, commands and quoted messages


class Block(NamedTuple):
    """A fenced block of a page.

    Args:
        language: The first word of its fence.
        runs: Whether the block runs here. Others have ``no-run`` in the fence and give the reason in their first line.
        line: Line of the page where its text begins.
    """

    language: str
    runs: bool
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2] is None, match[3], text.count("\n", 0, match.start(3)) + 1)
        for match in BLOCK.finditer(text)
    ]


def prose(page: Path) -> str:
    """Return a page without its blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands(block: Block) -> Iterator[list[str]]:
    """Return the words after each ``trl-tpu`` in a block of shell or YAML, also in commands quoted within commands."""
    if block.language == "yaml":
        yield from listed(yaml.safe_load(block.text))
        return
    for line in block.text.replace("\\\n", " ").splitlines():
        yield from typed(line)


def typed(line: str) -> Iterator[list[str]]:
    words = shlex.split(line, comments=True)
    for word in words:
        if "trl-tpu " in word:
            yield from typed(word.partition("=")[2] if word.startswith("--") else word)
    if "trl-tpu" in words:
        yield words[words.index("trl-tpu") + 1 :]


def listed(value: Any) -> Iterator[list[str]]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        if value[:1] == ["trl-tpu"]:
            yield value[1:]
        for part in value:
            yield from listed(part)


def texts_in_source(package: Path) -> list[str]:
    """Return every text in the source of a package, with "..." in place of values."""
    texts = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[sd]|%\.\d+f", "...", node.value))
            elif isinstance(node, ast.JoinedStr):
                texts += ["".join(str(one.value) if isinstance(one, ast.Constant) else "..." for one in node.values)]
    return texts


def quoted(text: str) -> list[str]:
    """Return the code spans of a line, in single or double backticks."""
    return [(two or one).strip() for two, one in re.findall(r"``(.+?)``|`([^`]+)`", text)]


# ---- execution in a folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the repository's files, and tiny models and datasets under the names of large ones."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "Makefile", "setup.cfg"):
        (folder / name).symlink_to(ROOT / name)
    language_model = folder / "Qwen" / "Qwen2.5-0.5B-Instruct"
    Path(synthetic.resolve_model("synthetic:tiny", str(language_model.parent))).rename(language_model)
    (folder / "meta-llama").mkdir()
    (folder / "meta-llama" / "Llama-3.1-8B-Instruct").symlink_to(language_model)
    model = AutoModelForSequenceClassification.from_pretrained(language_model, num_labels=1)
    synthetic.tiny_tokenizer().save_pretrained(folder / "runs" / "quickstart")
    model.save_pretrained(folder / "runs" / "quickstart")
    pairs = folder / "trl-lib" / "ultrafeedback_binarized"
    for split, rows in synthetic.load_dataset(synthetic.DATASET).items():
        rows.select(range(16)).to_json(pairs / f"{split}.jsonl")
    (folder / "allenai" / "reward-bench-2").mkdir(parents=True)
    questions = [("Math", "1"), ("Ties", "ref:1"), ("Ties", "tied:1")]
    rows = [
        {"prompt": "2 + 3?", "chosen": ["5", "five"], "rejected": ["6"], "subset": name, "id": id}
        for name, id in questions
    ]
    Dataset.from_list(rows).to_json(folder / "allenai" / "reward-bench-2" / "test.jsonl")
    programs = folder / "programs"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return folder


def run_command(program: str, device: str, devices: str, *words: str) -> tuple[int, str]:
    """Return the status and output of a command, limited to two steps unless it sets their number."""
    if device or program == "python":
        chosen = {"USE_TORCH_XLA": "1", "PJRT_DEVICE": device, "CPU_NUM_DEVICES": devices} if device else {}
        words = words if program == "python" else ("-m", "trl_tpu.cli", *words)
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | chosen
        process = subprocesses.python(*words, environment=environment, folder=Path.cwd())
        sys.stderr.write(process.stderr)
        return process.returncode, process.stdout
    if words[0] == "plan":  # compilation takes minutes; tests/tpu covers it
        check_flags(list(words))
        return 0, ""
    if words[0] == "reward" and "--max_steps" not in words:
        words = (*words, "--max_steps", "2")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            status = cli.main([*words])
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    return status, said.getvalue()


def run_shell(text: str, folder: Path) -> None:
    ask, shell_asks = os.pipe()
    shell_hears, answer = os.pipe()
    said = folder / "programs" / "said"
    environment = os.environ | {
        "PATH": f"{folder / 'programs'}:{os.environ['PATH']}",
        "ASK": str(shell_asks),
        "ANSWER": str(shell_hears),
        "SAID": str(said),
    }
    words = ["/bin/bash", "-e", "-o", "pipefail", "-c", text]
    shell = subprocess.Popen(words, cwd=folder, env=environment, pass_fds=(shell_asks, shell_hears))
    os.close(shell_asks)
    os.close(shell_hears)
    with os.fdopen(ask) as asked, os.fdopen(answer, "w") as answers:
        for line in asked:  # ends with the shell
            status, output = run_command(*line.rstrip("\n").split("\x1f")[:-1])
            said.write_text(output)
            print(status, file=answers, flush=True)
    assert shell.wait() == 0, text


def check_flags(words: list[str]) -> None:
    """Parse the words of a command without its `--config` file, which may not exist."""
    command, *words = words
    if "--config" in words:
        at = words.index("--config")
        words = words[:at] + words[at + 2 :]
    unknown = MAKE_PARSER[command]().parse_known_args(words)[1]
    assert not unknown, f"trl-tpu {command} has no {unknown}"


def shuffled(names: list[str]) -> list[str]:
    """Return the names in random order, the same in all processes of a test run."""
    return random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).sample(names, len(names))


def changes(folder: Path) -> dict[Path, int]:
    """Return the time of the last change of each file."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "programs")
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize(
    "name", shuffled([name for name in NAMES if any(block.runs for block in blocks(ROOT / name))])
)
def test_page_blocks_run_in_order(name: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [block for block in blocks(ROOT / name) if block.runs]
    before = changes(checkout)
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(synthetic, "TRAIN_NUMBER_PAIRS", 16)
    monkeypatch.setattr(synthetic, "TEST_NUMBER_PAIRS", 4)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in found:
        if "PJRT_DEVICE" in block.text and importlib.util.find_spec("torch_xla") is None:
            pytest.skip("torch_xla is not installed")
        if block.language == "bash":
            run_shell(block.text, checkout)
        elif block.language == "python":
            names = {"__name__": "__main__"} if name in ON_THEIR_OWN else names
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(ROOT / name), "exec"), names)
        elif block.language == "yaml":
            file = re.match(r"# (\S+\.yaml)\n", block.text)
            assert file is not None, "the first line names the file that a block of YAML is"
            (checkout / file[1]).write_text(block.text)
        else:
            assert block.language in ("text", "diff"), f"line {block.line}: a block of {block.language} is not tested"
    after = changes(checkout)
    assert [path for path in before if before[path] != after.get(path)] == [], "files of other pages were changed"


@pytest.mark.parametrize("name", NAMES)
def test_flags_links_and_files_exist_and_skipped_blocks_say_why(name: str) -> None:
    page = ROOT / name
    for block in blocks(page):
        assert block.runs or block.text.startswith(NOT_RUN)
        for words in commands(block) if not block.runs else ():
            check_flags(words)
    spans = quoted(prose(page))
    assert {span.split()[0] for span in spans if span.startswith("--")} <= FLAGS | {"--config"}
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    paths = [span for span in spans if re.fullmatch(r"(trl_tpu|tests|examples)/[\w/.]+", span)]
    places = [*(page.parent / link for link in links), *(ROOT / path for path in paths)]
    assert [place for place in places if not place.exists()] == []


def test_names_and_files_in_pages_for_developers_exist() -> None:
    files = [path for folder in ("trl_tpu", "tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    words = set(re.findall(r"\w+", " ".join(path.read_text(encoding="utf-8") for path in files)))
    for page in FOR_DEVELOPERS:
        spans = set(quoted(prose(GUIDES / f"{page}.md")))
        paths = {span for span in spans if re.fullmatch(r"[\w/]+(/|\.py)", span)}
        assert [path for path in paths if not any((root / path).exists() for root in (ROOT, ROOT / "trl_tpu"))] == []
        names = {span for span in spans - paths if re.fullmatch(r"[\w.]+(\(.*\))?", span)}
        assert [name for name in names if not words.issuperset(re.findall(r"\w+", name))] == []


def test_each_release_says_whether_numbers_stay_comparable() -> None:
    releases = re.split(r"^## ", (GUIDES / "releases.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    (version,) = re.findall(r"^version = (.+)$", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.MULTILINE)
    assert releases[0].startswith(f"{version}\n") and f"Version {version} " in (ROOT / "README.md").read_text()
    assert all(re.search(r"^\*\*Numbers stay comparable: (yes|no)\*\*", text, re.MULTILINE) for text in releases)


def test_readme_links_every_guide() -> None:
    links = re.findall(r"\]\((examples/[^)]+\.md)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {page.relative_to(ROOT).as_posix() for page in EXAMPLES.rglob("*.md")} <= set(links)


# ---- facts copied into the pages


def test_quoted_messages_exist_in_the_source() -> None:
    troubleshooting = (GUIDES / "troubleshooting.md").read_text(encoding="utf-8")
    lines = re.findall(r"^### (.+)$|^- (`.+?`):", troubleshooting, re.MULTILINE)
    lines += re.findall(r"^\| (`.+?)( )\| ", prose(GUIDES / "packing.md"), re.MULTILINE)
    messages = {span for line in lines for span in quoted("".join(line))}
    texts = texts_in_source(ROOT / "trl_tpu")
    for message in messages - {"RESOURCE_EXHAUSTED", "CUDA out of memory", "trl-tpu score"}:
        parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
        pattern = re.compile(".*".join(parts), re.DOTALL)
        assert any(pattern.search(text) for text in texts), message


def test_readme_lists_the_proven_packed_models() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    proven, compared = re.findall(r"^\| (.+?) \| packed \|", readme, re.MULTILINE)
    (recurrent,) = re.findall(r"^\| with recurrent layers: (.+?) \|", readme, re.MULTILINE)
    assert set(quoted(proven)) == PROVEN_TYPES
    assert set(quoted(compared)) == {*DECODERS, *WITH_CLASS} - PROVEN_TYPES
    assert set(quoted(recurrent)) == HYBRIDS.keys()


def test_guide_lists_every_causal_language_model_type() -> None:
    listed = quoted((GUIDES / "model_families.md").read_text(encoding="utf-8").partition("<!-- written")[2])
    assert set(listed) == {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}


@pytest.mark.long
def test_guide_of_model_families_equals_a_new_trial(tmp_path: Path) -> None:
    model_families.write(tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == model_families.PAGE.read_text(encoding="utf-8")


def test_every_easydel_field_has_one_row_and_is_accepted_or_gets_a_suggestion(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`.+?) \| (.*?) ?\| .*\|$", prose(GUIDES / "from_easydel.md"), re.MULTILINE)
    theirs = [name for names, _ in rows for name in quoted(names)]
    assert len(theirs) == len(set(theirs)) == 133  # fields of EasyDeL 0.3.0
    fields = {each.name for kind in (RewardConfig, ModelConfig, ScriptArguments) for each in dataclasses.fields(kind)}
    known = fields | {*inspect.signature(RewardTrainer).parameters}
    ours = {name for names, own in rows for name in quoted(names if own == "the same" else own)}
    assert ours <= known | {f"trl-tpu {name}" for name in cli.COMMANDS}
    assert not [name for name in fields for pattern in arguments.OLD_NAMES if re.fullmatch(pattern, name)]
    for today in arguments.OLD_NAMES.values():
        assert today.startswith(("leave it out", "set ", "trl-tpu ")) or re.match(r"\w+", today)[0] in known, today
    for name in {*theirs} - fields:
        with pytest.raises(UserError, match=rf"\b{name}\b"):
            RewardConfig(str(tmp_path), report_to="none", **{name: None})
    (text,) = (each.text for each in blocks(GUIDES / "from_easydel.md") if "learning_rate=5e-5" in each.text)
    for today, comment in re.findall(r"^    (\w+)=.+?,  # (.+)$", text, re.MULTILINE):
        for old in re.findall(r"(\w+)=", comment):
            assert old == today or re.search(rf": use {today}\b", arguments.advice_on_old_names([old])), old


def test_easydel_tutorial_flags_get_a_suggestion() -> None:
    (text,) = (each.text for each in blocks(GUIDES / "from_easydel.md") if "easydel.scripts.finetune" in each.text)
    words = shlex.split(text.replace("\\\n", " "), comments=True)[3:]
    flags = {"repo_id": "model_name_or_path", "dataset_split": "dataset_train_split", "use_wandb": "report_to"}
    flags |= {"max_sequence_length": "max_length", "attn_mechanism": "attn_implementation"}
    with pytest.raises(UserError) as raised:
        reward.make_parser().parse_args_and_config([*words, "--output_dir", "out"])
    assert [flag for flag, today in flags.items() if f"--{flag}: use --{today}" not in str(raised.value)] == []
    assert "--do_last_save: leave it out" in str(raised.value)
    keys = dict.fromkeys(flags, "x") | {"output_dir": "out"}
    with pytest.raises(UserError) as raised:
        reward.make_parser().parse_args_and_config([], config=keys)
    assert [key for key, today in flags.items() if f"{key}: use --{today}" not in str(raised.value)] == []
    with pytest.raises(UserTypeError, match="arguments: use args"):
        RewardTrainer("model", arguments=None)


def test_example_sharding_plan_fits_a_llama(tmp_path: Path) -> None:
    (block,) = [each for each in blocks(GUIDES / "sharding_and_slices.md") if "plan.yaml" in each.text[:20]]
    (tmp_path / "plan.yaml").write_text(block.text)
    model = synthetic.tiny_model(synthetic.tiny_tokenizer())
    Rules.read(tmp_path / "plan.yaml").check(["score.weight", *(name for name, _ in model.named_parameters())])


def script(path: Path) -> Any:
    return SimpleNamespace(**runpy.run_path(str(path)))


def test_picture_equals_the_output_of_its_script() -> None:
    drawn = script(GUIDES / "packed_pair.py").picture()
    assert (GUIDES / "packed_pair.svg").read_text(encoding="utf-8") == f"{drawn}\n"


def test_table_of_slices_equals_the_output_of_its_script(capsys: pytest.CaptureFixture) -> None:
    """Each entry leaves a fifth of a chip free. State takes 16 bytes per trained and 4 per frozen parameter."""
    memory = script(EXAMPLES / "slice_memory.py")
    memory.main()
    printed = capsys.readouterr().out
    assert printed.count("\n") > 10
    assert printed in (GUIDES / "sharding_and_slices.md").read_text()
    rows = memory.table()
    assert len(rows) == len(memory.CHOICES)
    for name, slice_name, _, _, state, inputs, of in rows:
        assert state + inputs < 0.8 * of, (name, slice_name)
    config = AutoConfig.for_model(**memory.MODELS["Qwen2.5-0.5B"])
    model = memory.model_without_weights(config, "float32")
    count = sum(parameter.numel() for parameter in model.parameters())
    for trained, size in ((1.0, 16), (0.0, 4)):
        state, _ = memory.gigabytes_per_chip(model, "fsdp=-1", 8, trained)
        assert state == pytest.approx(size * count / 8 / 1e9, rel=1e-3)
