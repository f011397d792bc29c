"""Parsers from a command line and its YAML file to dataclasses: TRL's `TrlParser`, and the commands' parser."""

import argparse
import copy
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin

from transformers.hf_argparser import HfArgumentParser, string_to_bool

from trl_tpu.compat.arguments import advice_on_old_names
from trl_tpu.config.checks import SETTINGS
from trl_tpu.errors import UserError, explaining
from trl_tpu.scripts.config_file import take_config


class TrlParser(HfArgumentParser):
    """An [`~transformers.HfArgumentParser`] that also reads a YAML file, like TRL's parser of the same name.

    The values of ``--config FILE`` become the defaults of the flags, so the command line takes precedence. The file's
    ``env`` section is exported to the environment. Flags of optional fields that are not strings accept ``none`` and
    ``null``. Flags of dict fields take a JSON object.

    Args:
        dataclass_types: One dataclass or several; none may have a field named ``config``.
        **kwargs: Passed on to [`argparse.ArgumentParser`].

    Raises:
        UserError: A dataclass has a field named ``config``.
    """

    @staticmethod
    def _parse_dataclass_field(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
        if field.name == "config":
            raise UserError("A dataclass has a field named 'config', the flag of the YAML file. Rename the field.")
        members = get_args(field.type)
        # This private method of the base class adds the flag of a field. It changes `field.type` in place, so pass a
        # copy to keep the user's dataclass unchanged.
        HfArgumentParser._parse_dataclass_field(parser, copy.copy(field))
        action = parser._option_string_actions[f"--{field.name}"]
        if get_origin(action.type) is dict or action.type is dict:
            action.type = json.loads
        takes_one_value = action.nargs is None and action.choices is None and bool not in members
        if NoneType in members and takes_one_value and callable(action.type) and action.type is not str:
            action.type = _or_none(action.type)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """Parse the command line and the YAML file that ``--config`` names.

        Args:
            args: Command-line arguments; by default ``sys.argv[1:]``.
            return_remaining_strings: Append a list of unknown arguments, first those in the file, instead of raising.
            fail_with_unknown_args: Whether a key in the file that matches no flag is an error.
            separate_remaining_strings: With `return_remaining_strings`, append two lists of unknown arguments: from
                the file, and from the command line.
            config: The file's values, if `take_config` has read the file; `args` are then the arguments that it
                returned.

        Returns:
            The dataclass instances, in the order of the constructor, then the lists of unknown arguments, if any.

        Raises:
            UserError: Unknown flags or keys, a file that is not a YAML mapping, a value outside a flag's choices, or a
                value that a dataclass rejects.
        """
        if config is None:
            config, args = take_config(args)
        with explaining("The arguments cannot be used", "Correct them."):
            unknown_keys = self.set_defaults_with_config(**config)
            *parsed, unknown_words = self.parse_args_into_dataclasses(args=args, return_remaining_strings=True)
        if return_remaining_strings:
            left = [unknown_keys, unknown_words] if separate_remaining_strings else [unknown_keys + unknown_words]
            return (*parsed, *left)
        if unknown := unknown_words + (unknown_keys if fail_with_unknown_args else []):
            names = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            flags = [f"--{action.dest}" for action in self._actions]
            similar = {match: name for name in names for match in get_close_matches(name, flags, n=1, cutoff=0.8)}
            guesses = "; ".join(f"{name}: did you mean {match}" for match, name in similar.items())
            fix = advice_on_old_names(names) or guesses or "Correct them"
            raise UserError(f"Unknown arguments: {' '.join(unknown)}. {fix}.")
        return tuple(parsed)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Set the defaults of flags by name, here and in subparsers; a flag with a default is optional.

        Returns:
            Values that match no flag, as command-line arguments: ``["--name", "value", ...]``.

        Raises:
            UserError: A value is not among the flag's choices.
        """
        actions, taken = list(self._actions), set()
        for action in actions:
            if isinstance(action, argparse._SubParsersAction):
                actions += [inner for subparser in action.choices.values() for inner in subparser._actions]
            elif action.dest in kwargs:
                action.default, action.required = _default(action, kwargs[action.dest]), False
                taken.add(action.dest)
        return [word for key, value in kwargs.items() if key not in taken for word in (f"--{key}", str(value))]

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and only the message: a usage text of some 150 flags would hide it."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\nSee `{self.prog} --help` for the flags.\n")


class CommandParser(TrlParser):
    """Parser of a command: ``--help`` shows the most important flags, ``--help all`` shows all flags by group.

    Args:
        dataclass_types: The dataclasses, as in `TrlParser`.
        first: Names of the most important flags, in the order of the help.
        prog: Name of the command.
    """

    def __init__(self, dataclass_types: Iterable[Any], first: Sequence[str], prog: str | None) -> None:
        super().__init__(dataclass_types, prog=prog, add_help=False)
        self._titles = dict.fromkeys(first, "The most important flags (--help all shows all flags)")
        self.add_argument("-h", "--help", action=_Help, nargs="?", choices=["all"], default=argparse.SUPPRESS)

    def show_all(self) -> None:
        """Make the help show all flags."""
        titles = {field.name: kind.__name__ for kind in self.dataclass_types for field in dataclasses.fields(kind)}
        self._titles = titles | {name: SETTINGS[name].group for name in SETTINGS if name in titles}

    def format_help(self) -> str:
        titles, names = self._titles, [*self._titles]
        formatter = _Formatter(self.prog)
        formatter.add_text(f"usage: {self.prog} [--config FILE] [--FLAG VALUE ...]. FILE is YAML: `FLAG: VALUE`.")
        for title in dict.fromkeys(titles.values()):
            flags = [action for action in self._actions if titles.get(action.dest) == title]
            formatter.start_section(title)
            formatter.add_arguments(sorted(flags, key=lambda action: names.index(action.dest)))
            formatter.end_section()
        return formatter.format_help()


class _Help(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values == "all":
            parser.show_all()
        parser.print_help()
        parser.exit()


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help formatter that shows each flag without its spelling with hyphens and without its name in capitals."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return ", ".join(flag for flag in action.option_strings if "-" not in flag.lstrip("-"))


def _default(action: argparse.Action, value: Any) -> Any:
    """Convert a value of the file to a flag's default.

    argparse converts defaults that are text, but not text in lists, and does not check choices.

    Raises:
        UserError: The value is not among the flag's choices.
    """
    choices = [str(choice) for choice in action.choices or ()]
    if choices and value is not None and str(value) not in choices:
        raise UserError(f"`{action.dest}: {value}` is not one of {', '.join(choices)}.")
    convert = action.type if callable(action.type) else str
    if isinstance(value, list):
        return [convert(item) if isinstance(item, str) else item for item in value]
    if convert is string_to_bool:
        return {"on": True, "off": False}.get(str(value).lower(), value)
    return value


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(word: str) -> Any:
        return None if word.lower() in ("none", "null") else convert(word)

    parse.__name__ = getattr(convert, "__name__", "value")  # argparse prints this name: "invalid int value: ..."
    return parse
