"""The `cardcage` command: finds the subcommand, runs it, and turns errors into one message.

Only the standard library is imported here; each subcommand's module is imported when it runs,
so that `--help`, `--version` and `plugins` stay quick and import no torch.

Exit codes: 0 done, 1 failed, 2 wrong usage or config, 3 a required plugin failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PLUGIN = 3

# name -> (module:function taking the arguments after the name, help line)
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("cardcage.core.cli_serve:main_serve", "serve a model over HTTP"),
    "chat": ("cardcage.core.cli_chat:main_chat", "talk to a model or a server"),
    "complete": ("cardcage.core.cli_chat:main_complete", "complete a text"),
    "bench": ("cardcage.core.cli_bench:main", "measure throughput, latency, start-up, serving"),
    "torture": ("cardcage.core.torture:main", "run the scheduler under random adversity"),
    "plugins": ("cardcage.core.cli_plugins:main", "list, explain, examine and start plugins"),
    "config": ("cardcage.core.cli_config:main", "show the resolved config and its schema"),
    "collect-env": ("cardcage.core.cli_env:main", "print what a bug report needs"),
}

_USAGE = """\
usage: cardcage [--no-plugins] COMMAND [arguments]

An LLM inference engine whose every part is a plugin.

commands:
{commands}

options:
  --no-plugins   use bundled plugins only (CARDCAGE_PLUGINS=none)
  --version      print the version
  --help         print this, or a command's own help after its name
"""


class Parser(argparse.ArgumentParser):
    """argparse that suggests the nearest flag or word and exits with code 2."""

    config_flags = False  # whether config flags are taken from the line before this parser

    def error(self, message: str) -> NoReturn:
        """Print usage and the message with a suggestion; exit 2."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}{self._nearest(message)}\n")

    def _nearest(self, message: str) -> str:
        if not message.startswith("unrecognized arguments:"):
            return ""
        flags = [w for w in message.split() if w.startswith("--")]
        if not flags:
            return ""
        word = flags[0].split("=")[0]
        known = [name for parser in self._all() for name in parser._option_string_actions]
        close = get_close_matches(word, known, n=1, cutoff=0.6)
        if close:
            return f'; did you mean "{close[0]}"?'
        if self.config_flags:
            from cardcage.core.config import nearest_flag

            return nearest_flag(word)
        return ""

    def _all(self) -> list[argparse.ArgumentParser]:
        """This parser and those of its subcommands: argparse reports unknown flags up here."""
        found: list[argparse.ArgumentParser] = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += action.choices.values()
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: arguments after the program's name; None reads `sys.argv`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        return _report(error)


def _run(words: list[str]) -> int:
    while words and words[0].startswith("-"):
        flag = words.pop(0)
        if flag == "--no-plugins":
            os.environ["CARDCAGE_PLUGINS"] = "none"
        elif flag in ("-V", "--version"):
            from cardcage import __version__

            print(f"cardcage {__version__}")
            return 0
        elif flag in ("-h", "--help"):
            return _help()
        else:
            known = ["--no-plugins", "--version", "--help"]
            return _usage_error(f"unknown option {flag}", flag, known)
    if not words:
        _help(sys.stderr)
        return EXIT_USAGE
    name, rest = words[0], words[1:]
    if name == "help":
        return _help() if not rest else _run([rest[0], "--help"])
    command = _find(name)
    return int(command(rest) or 0) if command else _unknown(name, rest)


def _find(name: str) -> Callable[[list[str]], Any] | None:
    entry = COMMANDS.get(name)
    if entry is None:
        return None
    module_name, _, function = entry[0].partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise SystemExit(f"cardcage {name}: this installation lacks {module_name}") from error
    found: Callable[[list[str]], Any] = getattr(module, function)
    return found


def _unknown(name: str, rest: list[str]) -> int:
    """A command that is not built in: ask the active hook plugins, then suggest."""
    from cardcage.core.hookspecs import plugin_commands

    extra = plugin_commands()
    for command in extra:
        if command.name == name:
            return int(command.run(rest) or 0)
    known = [*COMMANDS, *(c.name for c in extra)]
    return _usage_error(f"there is no command {name!r}", name, known)


def _help(stream: Any = None) -> int:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    print(_USAGE.format(commands="\n".join(lines)), end="", file=stream or sys.stdout)
    return 0


def _usage_error(message: str, word: str, known: Sequence[str]) -> int:
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f'; did you mean "{close[0]}"?' if close else ""
    print(f"cardcage: {message}{hint} (cardcage --help lists all)", file=sys.stderr)
    return EXIT_USAGE


def _report(error: Exception) -> int:
    """One plain message for errors of the tree; others keep their traceback."""
    from cardcage.core.errors import ConfigError, EngineError, PluginError

    if not isinstance(error, EngineError) or os.environ.get("CARDCAGE_DEBUG"):
        raise error
    print(f"cardcage: {error}", file=sys.stderr)
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_PLUGIN if isinstance(error, PluginError) else EXIT_FAILED


if __name__ == "__main__":
    raise SystemExit(main())
