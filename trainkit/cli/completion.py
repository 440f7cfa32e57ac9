"""Shell completion in bash, zsh and fish: commands, group choices and keys. It reads YAML files and no torch."""

from __future__ import annotations

import os
from pathlib import Path

from trainkit.cli.main import COMMANDS, Arguments
from trainkit.errors import UserError, nearest

# The shell calls the same command with the typed line in COMP_LINE.
# Without `=` in COMP_WORDBREAKS bash completes the whole `key=value`, not only what follows the sign.
_BASH = """\
_trainkit() { COMPREPLY=($(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" trainkit completion query)); }
complete -o nospace -o default -F _trainkit trainkit
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
"""
_ZSH = "autoload -Uz bashcompinit && bashcompinit\n" + _BASH
_FISH = """\
function _trainkit; COMP_LINE=(commandline -cp) trainkit completion query; end
complete -c trainkit -f -a '(_trainkit)'
"""
_WITHOUT_KEYS = ("completion", "doctor", "new", "report")  # the shell then offers files
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(arguments: Arguments) -> int:
    """Print the script for a shell; with `query`, the completions of COMP_LINE."""
    word = arguments.overrides[0] if arguments.overrides else "bash"
    if word == "query":
        line = os.environ.get("COMP_LINE", "")
        # fish sets no COMP_POINT: its line ends at the cursor.
        print("\n".join(completions(line[: int(os.environ.get("COMP_POINT", len(line)))])))
    elif word in _SCRIPTS:
        print(_SCRIPTS[word], end="")
    else:
        raise UserError(f"unknown shell '{word}'.{nearest(word, _SCRIPTS)} There are: {', '.join(_SCRIPTS)}.")
    return 0


def completions(line: str) -> list[str]:
    """Return the completions of the last word of `line`, the command line from its start to the cursor."""
    words = line.split()
    if line.endswith(" ") or not words:
        words.append("")
    if len(words) <= 2:
        return [name for name in COMMANDS if name.startswith(words[-1])]
    if words[1] in _WITHOUT_KEYS:
        return []
    # Imported here: the names of commands are completed without Hydra.
    from hydra.plugins.completion_plugin import DefaultCompletionPlugin

    from trainkit.cli.compose import CONFIG, compose_config
    from trainkit.cli.overrides import SIZES

    folders = [words[index + 1] for index, word in enumerate(words[:-1]) if word in ("--config-dir", "-cd")]
    typed = [word for word in words[2:-1] if "=" in word and not word.startswith("-")]
    with compose_config([folder for folder in folders if Path(folder).is_dir()]) as composer:
        plugin = DefaultCompletionPlugin(composer.loader)
        # Private: the plugin has no public way to complete a line without a shell.
        candidates: list[str] = plugin._query(config_name=CONFIG, line=" ".join([*typed, words[-1]]))
    names = [name for name in candidates if not name.startswith(("hydra", SIZES))]
    is_key = words[1] == "explain" and "=" not in words[-1]
    return [name.rstrip("=") if is_key else name for name in names]
