"""Reads a command line and its YAML file into dataclasses: TRL's `TrlParser`."""

import argparse
import copy
import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from transformers.hf_argparser import HfArgumentParser, string_to_bool

from trl_tpu.config.checks import todays_names
from trl_tpu.errors import UserError
from trl_tpu.scripts.config_file import take_config

T = TypeVar("T")


class TrlParser(HfArgumentParser):
    """An [`~transformers.HfArgumentParser`] that also reads a YAML file, as TRL's parser of this name does.

    The values of ``--config FILE`` become the defaults of the flags, so the command line wins; its ``env`` section is
    exported to the environment. Flags of optional fields that are not strings accept ``none`` and ``null``; flags of
    dict fields take a JSON object.

    Args:
        dataclass_types: One dataclass or several; none may have a field named ``config``.
        **kwargs: Passed on to [`argparse.ArgumentParser`].

    Raises:
        UserError: A dataclass has a field named ``config``.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        types: list[Any] = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or ())
        for type_ in types:
            if any(field.name == "config" for field in dataclasses.fields(type_)):
                raise UserError(f"{type_.__name__} has a field named 'config', which is the flag of the YAML file.")
        super().__init__(dataclass_types=types, **kwargs)

    @staticmethod
    def _parse_dataclass_field(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
        members = get_args(field.type)
        # A private method of the base class, which adds one flag for each field. It narrows `field.type` in place, so
        # it is given a copy, and the user's dataclass stays as it was.
        HfArgumentParser._parse_dataclass_field(parser, copy.copy(field))
        action = parser._option_string_actions[f"--{field.name}"]
        if get_origin(action.type) is dict or action.type is dict:
            action.type = _json_object
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
            args: Command-line words; ``sys.argv[1:]`` when left out.
            return_remaining_strings: Append the words that no flag took, the file's first, instead of failing on them.
            fail_with_unknown_args: Whether a key of the file that no flag has is an error.
            separate_remaining_strings: With `return_remaining_strings`, append two lists: the file's, the flags'.
            config: The file's values, if `take_config` has read them; `args` are then the words that it left.

        Returns:
            The dataclass instances, in the order of the constructor, then the words that were left.

        Raises:
            UserError: Unknown flags or keys, a file that is no YAML mapping, a value outside a flag's choices, or
                what a dataclass refuses.
        """
        words = sys.argv[1:] if args is None else list(args)
        if config is None:
            config, words = take_config(words)
        try:
            unknown_keys = self.set_defaults_with_config(**config)
            *parsed, unknown_words = self.parse_args_into_dataclasses(args=words, return_remaining_strings=True)
        except UserError:
            raise
        except ValueError as error:  # transformers refuses settings by plain ones, of several lines
            raise UserError(" ".join(str(error).split())) from error
        if return_remaining_strings:
            left = [unknown_keys, unknown_words] if separate_remaining_strings else [unknown_keys + unknown_words]
            return (*parsed, *left)
        if unknown_words:
            fix = todays_names(word for word in unknown_words if word.startswith("--")) or "Correct them"
            raise UserError(f"Unknown arguments on the command line: {' '.join(unknown_words)}. {fix}.")
        if unknown_keys and fail_with_unknown_args:
            fix = todays_names(key.removeprefix("--") for key in unknown_keys[::2]) or "Correct them"
            raise UserError(f"Unknown arguments in the config file: {' '.join(unknown_keys)}. {fix}.")
        return tuple(parsed)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Make the values the defaults of the flags of that name, here and in subparsers; they are then not required.

        Returns:
            What no flag took, as command-line words: ``["--name", "value", ...]``.

        Raises:
            UserError: A value that is not among the flag's choices.
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
        """Exit with status 2 and the message alone: the usage of some 150 flags would bury it."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\nSee `{self.prog} --help` for the flags.\n")


class CommandParser(TrlParser):
    """The parser of a command: ``--help`` shows the flags that matter first, ``--help all`` all, by their classes.

    Args:
        dataclass_types: As of `TrlParser`.
        first: Names of the flags that matter first.
        prog: The command.
    """

    def __init__(self, dataclass_types: Iterable[type], first: Sequence[str], prog: str | None) -> None:
        super().__init__(dataclass_types, prog=prog, add_help=False)
        self._titles = dict.fromkeys(first, "The first flags (--help all shows the others)")
        self.add_argument("-h", "--help", action=_Help, nargs="?", choices=["all"], default=argparse.SUPPRESS)

    def show_all(self) -> None:
        """Let the help be of all flags."""
        of_kinds = [(kind, each.name) for kind in self.dataclass_types for each in dataclasses.fields(kind)]
        self._titles = {name: _owner(kind, name).__name__ for kind, name in of_kinds}

    def format_help(self) -> str:
        titles, names = self._titles, [*self._titles]
        formatter = _Formatter(self.prog)
        formatter.add_text(f"usage: {self.prog} [--config FILE] [--FLAG VALUE ...]. FILE has `FLAG: VALUE`, in YAML.")
        for title in dict.fromkeys(titles.values()):
            flags = [each for each in self._actions if titles.get(each.dest) == title]
            formatter.start_section(title)
            formatter.add_arguments(sorted(flags, key=lambda each: names.index(each.dest)))
            formatter.end_section()
        return formatter.format_help()


class _Help(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values == "all":
            parser.show_all()
        parser.print_help()
        parser.exit()


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows each flag once: not with hyphens too, and without its name in capitals."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return ", ".join(each for each in action.option_strings if "-" not in each.lstrip("-"))


def _owner(kind: type, field: str) -> type:
    """Return the class in which a dataclass has got a field."""
    return next(each for each in kind.__mro__ if field in inspect.get_annotations(each))


def _default(action: argparse.Action, value: Any) -> Any:
    """Return a value of the file as the flag's default: argparse converts text, but not in lists, nor checks choices.

    Raises:
        UserError: It is not among the flag's choices.
    """
    choices = [str(choice) for choice in action.choices or ()]
    if choices and value is not None and str(value) not in choices:
        raise UserError(f"`{action.dest}: {value}` is not one of {', '.join(choices)}.")
    convert = action.type if callable(action.type) else str
    if isinstance(value, list):
        return [convert(each) if isinstance(each, str) else each for each in value]
    if convert is string_to_bool:
        return {"on": True, "off": False}.get(str(value).lower(), value)
    return value


def _or_none(convert: Callable[[str], T]) -> Callable[[str], T | None]:
    def parse(word: str) -> T | None:
        return None if word.lower() in ("none", "null") else convert(word)

    parse.__name__ = getattr(convert, "__name__", "value")  # argparse names it in "invalid int value: ..."
    return parse


def _json_object(word: str) -> dict[str, Any]:
    value = json.loads(word)
    if not isinstance(value, dict):
        raise UserError(f"expected a JSON object such as '{{\"a\": 1}}', not {word}")
    return value
