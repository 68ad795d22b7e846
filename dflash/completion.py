"""Completion of `dflash` in a shell: verbs, groups, and every option of a verb, as a script the shell reads once."""

from collections.abc import Callable

from dflash.command_line import TrainArguments, option_names
from dflash.config import BenchStepConfig, EvaluateConfig, ExportConfig, GenerateConfig
from dflash.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
HELP = """\
Completion of verbs and options:
  bash, zsh  source <(dflash --completion bash)        in ~/.bashrc or ~/.zshrc (with zsh instead of bash)
  fish       dflash --completion fish | source          in ~/.config/fish/config.fish
"""


def script(shell: str) -> str:
    """What the shell reads. ConfigError for another shell."""
    writers: dict[str, Callable[[dict[str, list[str]]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in writers:
        raise ConfigError(f"one of {', '.join(SHELLS)}", repr(shell), "name your shell", where="--completion")
    return writers[shell](words())


def words() -> dict[str, list[str]]:
    """What may follow `dflash VERB`, by verb: names and options."""
    from dflash.bench import BENCHES
    from dflash.data.options import PrepareOptions
    from dflash.doctor.verb import NAMES
    from dflash.pipeline.plan import PlanConfig
    from dflash.report.verb import ReportOptions
    from dflash.watch import WatchOptions

    train = _options(TrainArguments)
    return {
        "train": train,
        "evaluate": _options(EvaluateConfig),
        "generate": _options(GenerateConfig),
        "prepare": _options(PrepareOptions),
        "export": _options(ExportConfig),
        "bench": [*BENCHES, *train, *(f"--bench.{name}" for name in option_names(BenchStepConfig)), "--json"],
        "doctor": [*NAMES, *train, "--json", "--no-measure"],
        "plan": _options(PlanConfig),
        "watch": [o for o in _options(WatchOptions) if o != "--run"],
        "report": [o for o in _options(ReportOptions) if o != "--runs"],
    }


def _options(kind: type[object]) -> list[str]:
    return [f"--{name}" for name in option_names(kind)] + ["--help"]


def _bash(by_verb: dict[str, list[str]]) -> str:
    """Files are offered where no option is being typed."""
    cases = "\n".join(f'    {verb}) options="{" ".join(names)}" ;;' for verb, names in by_verb.items())
    return f"""\
_dflash() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" options=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(by_verb)} --help --version --completion" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$options" -- "$word"))
}}
complete -o default -F _dflash dflash
"""


def _zsh(by_verb: dict[str, list[str]]) -> str:
    return f"autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n{_bash(by_verb)}"


def _fish(by_verb: dict[str, list[str]]) -> str:
    lines = [f'complete -c dflash -n __fish_use_subcommand -f -a "{" ".join(by_verb)}"']
    for verb, names in by_verb.items():
        seen = f'"__fish_seen_subcommand_from {verb}"'
        for name in names:
            how = f"-l {name[2:]}" if name.startswith("--") else f"-a {name}"
            lines.append(f"complete -c dflash -n {seen} {how}")
    return "\n".join(lines) + "\n"
