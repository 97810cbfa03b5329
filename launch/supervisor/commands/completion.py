"""`poise completion`: what a shell needs to complete the words of a `poise` command; `poise man`: the manual page. Both are made from the
commands' own parsers."""

import shutil
import subprocess
import sys

from ..shared.build_facts import version
from ..shared.options import parser
from ..shared.trouble import DONE, RUN_ENDS, Refusal, shown, tell

_SHELLS = ("bash", "zsh", "fish")
_TAKE_FILES = ("FILE", "NAME|FILE", "RUN|orders.log", "DIR|FILE.tar.gz", "LOG")
_TAKE_FOLDERS = ("DIR", "RUN")


def completion(words, described):
    """`described()`: of each command its name, what it does, and its parser or None."""
    made = parser(
        "completion",
        "Prints what a shell needs to complete commands and options.\n\n"
        '  bash:  eval "$(poise completion bash)"                        in ~/.bashrc\n'
        '  zsh:   eval "$(poise completion zsh)"                         in ~/.zshrc, behind compinit\n'
        "  fish:  poise completion fish > ~/.config/fish/completions/poise.fish",
    )
    made.add_argument("shell", metavar="|".join(_SHELLS), help="which shell")
    given = made.parse_args(words)
    if given.shell not in _SHELLS:
        raise Refusal(f"completion: there is no {shown(given.shell)} here; there are: {', '.join(_SHELLS)}")
    tell({"bash": _bash, "zsh": _zsh, "fish": _fish}[given.shell](described()))
    return DONE


def man(words, described):
    made = parser("man", "Shows the manual page; where stdout is no terminal, prints its source, for `man -l -`.")
    made.parse_args(words)
    page = _page(described())
    if sys.stdout.isatty() and shutil.which("man"):
        return subprocess.run(["man", "-l", "-"], input=page, text=True, check=False).returncode
    tell(page)
    return DONE


def _options(made):
    return [action for action in made._actions if action.option_strings] if made else []


def _arguments(made):
    return [action for action in made._actions if not action.option_strings] if made else []


def _values(action):
    return [str(choice) for choice in action.choices or ()]


def _takes(action):
    """"values", "files", "folders", "text" or None, if nothing follows the option."""
    if action.nargs == 0:
        return None
    if action.choices:
        return "values"
    return "files" if action.metavar in _TAKE_FILES else "folders" if action.metavar in _TAKE_FOLDERS else "text"


def _bash(commands):
    words, after = [], []
    for name, _, made in commands:
        words.append(f"    {name}) words='{' '.join(word for action in _options(made) for word in action.option_strings)}' ;;")
        for action in _options(made):
            how = {"values": f"compgen -W '{' '.join(_values(action))}'", "files": "compgen -f", "folders": "compgen -d"}.get(_takes(action))
            if how:
                pattern = "|".join(f"{name}:{word}" for word in action.option_strings)
                after.append(f'    {pattern}) COMPREPLY=($({how} -- "$word")); return ;;')
    return "\n".join(
        ["_poise() {", "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words", "  COMPREPLY=()"]
        + ["  if [ \"$COMP_CWORD\" -eq 1 ]; then", f"    COMPREPLY=($(compgen -W '{' '.join(name for name, _, _ in commands)}' -- \"$word\")); return", "  fi"]
        + ['  case "${COMP_WORDS[1]}:$before" in', *after, "  esac", '  case "${COMP_WORDS[1]}" in', *words]
        + [f"    help) words='{' '.join(name for name, _, _ in commands)}' ;;", "    *) words='' ;;", "  esac"]
        + ['  case "$word" in', '    -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;', '    *) COMPREPLY=($(compgen -f -- "$word")) ;;', "  esac"]
        + ['  [ "${COMP_WORDS[1]}" = help ] && COMPREPLY=($(compgen -W "$words" -- "$word"))', "}", "complete -o filenames -F _poise poise"]
    )


def _quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


def _help_of(action):
    return " ".join((action.help or "").split())


def _zsh(commands):
    lines = ["#compdef poise", "_poise() {", "  local -a commands", "  commands=("]
    lines += [f"    {_quoted(name + ':' + meaning.replace(':', chr(92) + ':'))}" for name, meaning, _ in commands]
    lines += ["  )", "  if (( CURRENT == 2 )); then _describe command commands; return; fi", "  local command=$words[2]", "  shift words; (( CURRENT-- ))"]
    lines += ["  case $command in"]
    for name, _, made in commands:
        specs = []
        for action in _options(made):
            said = _help_of(action).replace("[", "(").replace("]", ")").replace(":", ";")
            how = {"values": f":value:({' '.join(_values(action))})", "files": ":file:_files", "folders": ":folder:_files -/", "text": ":value:"}
            specs += [_quoted(f"{word}[{said}]{how.get(_takes(action), '')}") for word in action.option_strings]
        lines.append(f"    {name}) _arguments {' '.join([*specs, _quoted('*:argument:_files')])} ;;")
    return "\n".join([*lines, "  esac", "}", "compdef _poise poise"])


def _fish(commands):
    lines = ["complete -c poise -f"]
    for name, meaning, made in commands:
        lines.append(f"complete -c poise -n __fish_use_subcommand -a {name} -d {_quoted(meaning)}")
        for action in _options(made):
            words = " ".join(f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" for word in action.option_strings)
            how = {"values": f" -x -a {_quoted(' '.join(_values(action)))}", "files": " -r -F", "folders": " -x -a '(__fish_complete_directories)'", "text": " -x"}
            lines.append(
                f"complete -c poise -n '__fish_seen_subcommand_from {name}' {words}{how.get(_takes(action), '')} -d {_quoted(_help_of(action))}"
            )
        if _arguments(made):
            lines.append(f"complete -c poise -n '__fish_seen_subcommand_from {name}' -F")
    return "\n".join(lines)


def _roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line[:1] in (".", "'") else line for line in text.splitlines())


def _page(commands):
    lines = [f'.TH POISE 1 "" "poise {version()}" "User commands"', ".SH NAME", "poise \\- offline LLM inference on one GPU too small for the model"]
    lines += [".SH SYNOPSIS", ".B poise", ".I COMMAND", "[option ...]", ".SH DESCRIPTION"]
    lines += ["Answers files of OpenAI batch requests with a model whose weights and context lie in host memory.", ".SH COMMANDS"]
    for name, meaning, made in commands:
        lines += [f".SS {_roff(name)}", _roff(made.description if made and made.description else meaning)]
        for action in [*_arguments(made), *_options(made)]:
            shows = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            value = "" if not action.option_strings or action.nargs == 0 else f" {action.metavar or '|'.join(_values(action))}"
            lines += [".TP", f".B {_roff(shows)}{_roff(value)}", _roff(_help_of(action)) or "\\&"]
    lines += [".SH EXIT STATUS"]
    for code, how in RUN_ENDS.items():
        lines += [".TP", f".B {code}", _roff(how)]
    return "\n".join(lines)
