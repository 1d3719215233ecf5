"""Mistakes that people make in a configuration and in params.yaml: one line each, with place, key
and remedy.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from every_block import FILE
from refusals import refusal
from test_environments import DIGEST, FETCH, fetch
from test_params import FILE as PARAMS
from test_sweep_settings import FILE as SWEEPS
from test_sweep_settings import RATE

from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings
from pipeline.settings.project.params import load_params

W = "behaviors.Walker"
H = f"{W}.hyperparameters"
N = f"{W}.network_settings"
P = "environment_parameters"
L = f"{P}.gap.curriculum[0]"
EVEN = "even_checkpoints: true\n    keep_checkpoints: 0"

# Old text, new text, line of the mistake, its key path, and words of the message.
MISTAKES = [
    ("env_settings:", "env_setings:", 28, "", "unknown key 'env_setings'", "'env_settings'"),
    ("max_steps: 1e6", "max_step: 1e6", 22, W, "unknown key 'max_step'", "'max_steps'"),
    ("max_steps: 1e6", "batch_size: 64", 22, W, "belongs under 'hyperparameters'", "Allowed: tr"),
    ("max_steps: 1e6", "hidden_units: 64", 22, W, "belongs under 'network_settings'", "Allowed"),
    ("buffer_size", "bufer_size", 6, H, "unknown key 'bufer_size' (value 640)", "'buffer_size'"),
    ("lambd:", "tau:", 9, f"{H}.tau", "is a setting of sac and xqc, not of ppo", "leave it out"),
    ("extrinsic", "extrinsik", 17, f"{W}.reward_signals", "unknown key", "'extrinsic'"),
    ("        demo_path: a.demo\n", "", 19, f"{W}.reward_signals.gail", "'demo_path'", "required"),
    ("trainer_type: ppo", "trainer_type: pop", 3, f"{W}.trainer_type", "'pop'", "'ppo'?"),
    ("    trainer_type: ppo\n", "", 3, H, "no trainer_type was given. Add one of: ppo, sac, poca"),
    ("simple", "simpl", 12, f"{N}.vis_encode_type", "'simpl' is not allowed", "nature_cnn, resnet"),
    ("linear", "Linear", 8, f"{H}.learning_rate_schedule", "'Linear'", "did you mean 'linear'?"),
    ("batch_size: 64", "batch_size: 64.5", 5, f"{H}.batch_size", "whole number", "got 64.5"),
    ("batch_size: 64", "batch_size: true", 5, f"{H}.batch_size", "whole number", "got True"),
    ("batch_size: 64", "batch_size: many", 5, f"{H}.batch_size", "whole number", "got 'many'"),
    ("batch_size: 64", "batch_size: 0", 5, f"{H}.batch_size", "must be at least 1", "got 0"),
    ("batch_size: 64", "batch_size: 1e30", 5, f"{H}.batch_size", "is too large", "got 1e+30"),
    ("batch_size: 64", "batch_size:", 5, f"{H}.batch_size", "whole number", "got nothing (null)"),
    ("3e-4", "fast", 7, f"{H}.learning_rate", "needs a number", "got 'fast'"),
    ("3e-4", "-1e-3", 7, f"{H}.learning_rate", "must be greater than 0", "got -0.001"),
    ("3e-4", ".nan", 7, f"{H}.learning_rate", "needs a number", "got nan"),
    ("3e-4", "false", 7, f"{H}.learning_rate", "needs a number", "got False"),
    ("0.95", "1.5", 9, f"{H}.lambd", "must be at most 1", "got 1.5"),
    ("gamma: 0.99", "gamma: 99", 18, f"{W}.reward_signals.extrinsic.gamma", "at most 1", "99"),
    ("size: 128", "size: 3", 14, f"{N}.memory.memory_size", "must be divisible by 2", "got 3"),
    ("length: 64", "length: 65", 15, f"{N}.memory.sequence_length", "batch_size", "got 65"),
    ("threaded: false", "threaded: n", 23, f"{W}.threaded", "needs true or false", "got 'n'"),
    ("threaded: false", 'threaded: "no"', 23, f"{W}.threaded", "needs true or false", "got 'no'"),
    ("5005", "70000", 29, "env_settings.base_port", "must be at most 65535", "got 70000"),
    ("[--x]", "--x", 30, "env_settings.env_args", "got '--x'", "; write [--x]"),
    ("[--x]", "[{a: 1}]", 30, "env_settings.env_args[0]", "needs text", "got {'a': 1}"),
    ("  time_scale: 20", "  - 20", 31, "engine_settings", "needs a map", "got [20]"),
    ("uniform", "unifrom", 35, f"{P}.mass.sampler_type", "'unifrom'", "'uniform'?"),
    ("0.5\n      max", "5\n      max", 37, f"{P}.mass.sampler_parameters.min_value", "exceed", "5"),
    ("    sampler_type: uniform\n", "", 34, f"{P}.mass", "does not contain sampler_type", "both"),
    ("sampler_type: uniform", "sampler-type: uniform", 35, f"{P}.mass", "unknown", "sampler_type"),
    ("progress", "speed", 44, f"{L}.completion_criteria.measure", "'speed'", "reward"),
    ("d: 0.5", "d: 5", 45, f"{L}.completion_criteria.threshold", "must be in [0, 1]", "got 5"),
    ("        value: 1\n", "", 41, L, "the key 'value' is", "required"),
    ("value: 1\n", "value: one\n", 46, f"{L}.value", "needs a number", "'one'"),
    ("run_id: a", "run_id: [a]", 50, "checkpoint_settings.run_id", "needs text", "got ['a']"),
    ("max_steps: 1e6", EVEN, 23, f"{W}.keep_checkpoints", "between 1 and max_steps", "got 0"),
]


ENDLESS, ENDS = (
    f"{{name: {name}, value: 1{more}}}"
    for name, more in (("x", ""), ("y", ", completion_criteria: {behavior: A, threshold: 1}"))
)
MAP, DEMO = "needs a map of keys to values, got", "demo_path: needs"
TAG = "the tag 'tag:yaml.org,2002:python/name:os.system' is not allowed, because settings are "
TAG += "plain data"
OLD = "default: {trainer: ppo, max_steps: 5.0e4}\nA:\n  batch_size: many\n"
CURRICULUM = """behaviors: {A: {}}
curriculum: {A: {measure: reward, thresholds: [1], parameters: {
gap: [1, 2, 3]}}}"""
# A whole file, and the start of the message after the file's name; an empty file is a mistake.
WHOLE = [
    (f"behaviours: {{A: {'x' * 500}}}", ":1: unknown key 'behaviours' (value {'A': 'xxxxxxxx"),
    ("behaviors: {A: }", ":1: behaviors.A: needs a map of keys to values, got nothing"),
    ("behaviors: [A]", ":1: behaviors: needs a map of keys to values, got ['A']"),
    ("- a", ":1: needs a map of keys to values, got ['a']"),
    ("torch_settings: true", f":1: torch_settings: {MAP} True; write {{}} for"),
    ("debug: true\nbehaviors: {}\n", ":2: behaviors: lists no behavior"),
    ("debug: !!python/name:os.system\n", f":1: cannot be read as YAML: {TAG}"),
    (OLD, ":3: behaviors.A.hyperparameters.batch_size: needs a whole number"),
    (CURRICULUM, ":3: curriculum.A.parameters.gap: needs 2 values"),
    *((text, ":1: has no settings") for text in ("", "\n\n", "# comment\n# more\n")),
    *((text, ":1: has no settings") for text in ("---\n", "{}\n", "null\n")),
]
RANGES = "sampler_type: multirangeuniform, sampler_parameters: {intervals"
# Text of a behavior or of an environment parameter, and the start of the message after its name.
MEMORY = "{network_settings: {memory: yes}}"
SIZES = "{sequence_length: 64, memory_size: 128}"
WIDTH = "hidden_units: must be a multiple of 4 with the trainer type 'poca', whose critic has as "
WIDTH += "many attention heads, got"
NO_DEMO = "reward_signals: {gail: {demo_path: []}}"
NOT_DEMO = "behavioral_cloning: {demo_path: true}"
POCA = "{trainer_type: poca, network_settings: {hidden_units: "
IN_BEHAVIORS = [
    *((f"{POCA}{n}}}}}", f"network_settings.{WIDTH} {n}") for n in (1, 10, 130)),
    ("{reward_signals: {}}", "reward_signals: needs at least one reward signal"),
    (MEMORY, f"network_settings.memory: {MAP} 'yes'; write {SIZES}, or leave it out"),
    ("{self_play: true}", f"self_play: {MAP} True; write {{}} for the defaults, or leave it out"),
    ("{behavioral_cloning: true}", f"behavioral_cloning: {MAP} True"),
    (f"{{{NO_DEMO}}}", f"reward_signals.gail.{DEMO} at least one demonstration, got an empty list"),
    (f"{{{NOT_DEMO}}}", f"behavioral_cloning.{DEMO} a path, or a list of paths and of maps with"),
]
OVER_DEFAULTS = [
    ("trainer_type: [ppo]", "trainer_type: ['ppo'] is not allowed. Allowed: ppo, sac, poca"),
    ("reward_signals: {extrinsic: null}", "reward_signals: needs at least one reward signal"),
]
NO_CRITERIA = "A non-terminal lesson does not have a completion_criteria for a."
EXCEEDS = "the minimum of [2.0, 1.0] exceeds its maximum"
IN_PARAMETERS = [
    ("{curriculum: []}", ".curriculum: needs at least one lesson"),
    (f"{{curriculum: [{ENDS}, {ENDS}, {ENDLESS}, {ENDLESS}]}}", f".curriculum[2]: {NO_CRITERIA}"),
    ("high", ": needs a number, a sampler or a curriculum, got 'high'"),
    (f"{{{RANGES}: [[1, 2, 3]]}}}}", ".sampler_parameters.intervals[0]: needs 2 values, got 3"),
    (f"{{{RANGES}: [[2, 1]]}}}}", f".sampler_parameters.intervals: {EXCEEDS}"),
]
RECORDED = "environment: ball\n    episodes: 5\n"
EVALUATION = "    evaluation:\n      episodes: 2\n      seed: 9\n"
EMPTY = "overrides:\n      behaviors: {Ball: {a..b: 1}}"
TWO_KEYS = "is written twice, once with a dotted key; keep one"
TWICE = "overrides:\n      {behaviors.Ball.max_steps: 3, behaviors: {Ball: {max_steps: 4}}}"
# Old and new text in params.yaml, the line of the mistake, and the start of the message.
IN_PARAMS = [
    ("torch_threads", "torch_thread", 2, "runtime: unknown key 'torch_thread' (value 2); did"),
    ("source: builtin", "source: bultin", 6, "environments.ball.source: 'bultin' is not allo"),
    ("    path: builds/game.x86_64\n", "", 8, "environments.game.path: the source 'path' nee"),
    ("  ball:", "  my.ball:", 5, "environments.my.ball: the name 'my.ball' is used for a folder"),
    ("  scratch:", "  a b:", 18, "experiments.a b: the name 'a b' is used for a folder"),
    ("    overrides: {}\n", "", 18, "experiments.scratch: the key 'overrides' is required"),
    ("overrides: {}", EMPTY, 22, "a..b: a part of this dotted key is empty"),
    ("overrides: {}", TWICE, 22, f"behaviors.Ball.max_steps: {TWO_KEYS}"),
    ("runtime:", "runs: {}\nruntime:", 1, "unknown key 'runs' (value {})"),
    ("runtime:", "track: [jsonl, mlfow]\nruntime:", 1, "track: 'mlfow' is not allowed; did you m"),
    ("runtime:", "track: jsonl\nruntime:", 1, "track: needs a list of sinks, got 'jsonl'"),
]
# The same, with the start of the message after the name of the section.
MADE = "data/demos/expert.demo"
BAL = "'bal' is not allowed; did you mean 'ball'?"
GMAE = "'gmae' is not allowed; did you mean 'game'?"
OUTPUT = f"{MADE!r} is the output of the stage demos; move your file elsewhere"
IN_DEMONSTRATIONS = [
    ("episodes: 5", "episodes: 0", 15, "episodes: must be at least 1"),
    (RECORDED, RECORDED.replace("ball", "bal"), 14, f"environment: {BAL}"),
    (RECORDED, "file: b.demo\n", 15, "seed: 1 is for recording, but 'file' names a recording"),
    ("    episodes: 5\n", "", 14, "environment: the key 'episodes' is required for recording"),
    (f"{RECORDED}    seed: 1\n", f"file: {MADE}\n", 14, f"file: {OUTPUT}"),
]
IN_SCRATCH = [
    ("environment: game", "environment: gmae", 19, f"environment: {GMAE}"),
    ("t.yaml", "u.yaml", 20, "trainer: the file 'config/u.yaml' does not exist"),
    ("t.yaml", "tt.yaml", 20, "trainer: the file 'config/tt.yaml' does not exist; did you mean '"),
    ("[3, 1]", "2", 22, "seeds: needs a list, got 2; write [2]"),
    ("[train]", "train", 23, "stages: needs a list, got 'train'; write ["),
    ("[3, 1]", "[3, 3]", 22, "seeds: needs one seed or more, each once"),
    ("[3, 1]", "[]", 22, "seeds: needs one seed or more, each once"),
    ("[3, 1]", "[-3]", 22, "seeds[0]: must be at least 0, got -3"),
    ("[train]", "[]", 23, "stages: must be some of ['pretrain', "),
    ("[train]", "[trian]", 23, "stages[0]: 'trian' is not allowed; did yo"),
    ("[train]", "[export, train]", 23, "stages: must be some of ["),
    ("[train]", "[train, train]", 23, "stages: must be some of ["),
    ("[train]", "[export]", 23, "stages: export needs the stage 'train'"),
    ("[train]", "[train, evaluate]", 23, "stages: evaluate needs the stag"),
    ("[train]", "[pretrain]", 23, "stages: pretrain needs the key 'demons"),
]
IN_CLONED = [
    (": expert", ": exprt", 31, "demonstrations: 'exprt' is not allowed; did you mean 'expert'?"),
    ("[pretrain, train", "[train", 31, "demonstrations: only the stage pret"),
    (EVALUATION, "", 37, "stages: evaluate needs the section 'evaluation'"),
]
SECOND = "{experiment: base, method: list, configurations: [{a.b: 1}, {a.c: 2}], seeds: [1]}"
PRUNED = "method: optuna\n    prune_after: 9\n    goal: minimize\n    runs: 3\n    seed: 0"
AT_BEST = """experiments:
  rates_best: {environment: ball, trainer: t.yaml, overrides: {}, seeds: [1], stages: [train]}
"""
FRACTIONS = "{min: 1.2, max: 1.8, integer: true}"
NO_WHOLE = "there is no whole number from 1.2 to 1.8; widen the interval"
PARALLEL = "method: grid\n    parallel: 2"
LOOKS = "ends trials with low rewards, but the sweep looks for the"
# Old and new text in a params.yaml with a sweep, and words of the message; a dot at their start
# stands for `sweeps.rates.`
IN_SWEEPS = [
    ("experiment: base", "experiment: bass", ".experiment: 'bass' is not allowed"),
    ("method: grid", "method: gird", ".method: 'gird' is not allowed; did you"),
    ("method: grid", "method: list", "method list does not use the key 'parameters'; remove"),
    ("method: grid", "method: random", ".method: the method random needs the key"),
    ("method: grid", "method: optuna", ".method: the method optuna needs the key"),
    ("method: grid", PARALLEL, ".parallel: belongs to the method optuna, not to grid; remove it"),
    ("method: grid", PRUNED, f".prune_after: {LOOKS}"),
    ("method: grid", PRUNED.replace("prune_after: 9", "startup: 0"), ".startup: "),
    ("[1e-4, 1e-3]", "[]", f".parameters.{RATE}: needs a list of values, or a map"),
    ("[1e-4, 1e-3]", "{values: [1]}", "values: write the list itself: learning_rate: [...]"),
    ("[1e-4, 1e-3]", "{min: 1, max: 2}", "needs a list of values for 'behaviors.Ball.hyperp"),
    ("[1e-4, 1e-3]", "{min: 2, max: 1}", f"parameters.{RATE}.max: must be above min (2.0)"),
    ("[1e-4, 1e-3]", FRACTIONS, f"parameters.{RATE}.integer: {NO_WHOLE}"),
    ("[1e-4, 1e-3]", "{min: 0, max: 1, scale: log}", "min: must be above 0 for scale log, got"),
    ("[500, 1000, 2000]", f"{list(range(500))}", "grid makes 1000 trials, more than 999; sweep"),
    ("[7, 8]", "[1, 8]", ".best: the sweep chooses the best configuration with the seeds [1]"),
    ("seeds: [1]\n", "seeds: []\n", ".seeds: needs one seed or more, each once"),
    ("  rates:\n", "  base:\n", "with those of the experiment 'base'; rename one"),
    ("[train, export, evaluate]", "[train]", "needs an experiment with the stages train, exp"),
    ("[base-1, rates]", "[base-3]", "subsets.smoke: there is no experiment, run or sweep 'ba"),
    ("[base-1, rates]", "[]", "subsets.smoke: is empty; list some of base, rates_best"),
    ("  smoke:", "  rates:", "is also the name of an experiment or sweep; rename one"),
    ("sweeps:\n", "swept:\n", "unknown key 'swept' (value"),
    # the second of two sweeps or subsets
    ("subsets:\n", f"  other: {SECOND}\nsubsets:\n".replace("base", "bose"), "sweeps.other.exper"),
    ("subsets:\n", f"  a.b: {SECOND}\nsubsets:\n", "sweeps.a.b: the name 'a.b'"),
    ("subsets:\n", "subsets:\n  a.b: [base]\n", "subsets.a.b: the name 'a.b'"),
    ("subsets:\n", "subsets:\n  few: [base, bose]\n", "subsets.few: there is no experiment"),
    ("experiments:\n", AT_BEST, "would be mixed with those of the experiment 'rates_best'"),
]
TEAMS = "belongs to the source 'pettingzoo' and 'module', but the"
ID = "belongs to the source 'gymnasium' and 'pettingzoo' and 'module', but the"
NO_ID = "gymnasium: an id is missing; write for example gymnasium:CartPole-v1"
PLATFORMS = "the keys of 'url' give the platforms already; remove 'platform'"
OF_LINUX = fetch(url="{linux: 'file:///x'}", sha256=f"{{linux: {DIGEST}}}", platform="linux")
METHOD = "needs 'Class.Method' of a script in Assets/Editor, got 'Build'"
EDITOR = "'editor' waits until someone presses Play, so its results could not be reproduced; train "
EDITOR += "with `pipeline learn` without --env, or use the source 'unity' to build the project"
# Text of an environment in params.yaml, and words of the message.
IN_ENVIRONMENTS = [
    ("{id: x}", "environments.cart: the key 'source' is required"),
    ("{source: gymnasum, id: x}", "source: 'gymnasum' is not allowed; did you mean 'gymnasi"),
    ("{source: gymnasium}", "environments.cart: the key 'id' is required"),
    ("{source: gymnasium, id: [x]}", "environments.cart.id: needs text, got ['x']"),
    ("{source: builtin, id: x}", f"cart.id: {ID}"),
    ("'gymnasium:'", f"environments.cart: {NO_ID}"),
    ("https://x.org/game.zip", "`pipeline env fetch` downloads the archive"),
    ("gym:CartPole-v1", "cart: 'gym:CartPole-v1' is not an environment; did you mean 'gymnas"),
    ("my-env:make", "'my-env:make' is not an environment. Give a path (./Game), a simulator"),
    (
        "{source: fetch, url: 'https://x/g.zip'}",
        "cart.sha256: the source 'fetch' needs the archive's digest; `pipeline env fetch https:"
        "//x/g.zip` prints it",
    ),
    (f"{{source: fetch, sha256: {DIGEST}}}", "url: the source 'fetch' needs this key: where"),
    (fetch(url="'http://['"), "url: must start with one of https, http, file, got"),
    (fetch(url="'ftp://x/g.zip'"), "url: must start with one of https, http, file, got"),
    (fetch(sha256="abc"), "cart.sha256: needs 64 hex digits, got 'abc'"),
    (fetch(url="{linus: x}"), "cart.url: 'linus' is not allowed; did you mean 'linux'?"),
    (fetch(url="{linux: 'https://x'}"), "cart.sha256: needs the same platforms as 'url' (l"),
    (fetch(url="[a]"), "cart.url: needs text, got ['a']"),
    (fetch(url="{linux: []}"), "cart.url.linux: needs text, got []"),
    (FETCH + "platform: amiga}", "cart.platform: 'amiga' is not allowed. Allowed: linux, da"),
    (OF_LINUX, f"cart.platform: {PLATFORMS}"),
    (FETCH + "executable: ../x}", "executable: must be a path inside the archive, got '../x'"),
    (FETCH + "max_ratio: 9}", "cart.max_ratio: is an old key; remove it: max_unpacked_gb limits"),
    (FETCH + "path: x}", "cart.path: belongs to the source 'path', but the source is 'fetch'"),
    (FETCH + "name: x}", "cart.name: belongs to the source 'builtin', but the source is 'fetch'"),
    ("{source: builtin, project: x}", "cart.project: belongs to the source 'unity', but"),
    (FETCH + "urls: x}", "cart: unknown key 'urls' (value 'x'); did you mean 'url'?"),
    ("{source: unity}", "project: the source 'unity' needs this key: where the Unity project is"),
    ("{source: unity, project: p, method: Build}", f"cart.method: {METHOD}"),
    ("{source: path}", "cart.path: the source 'path' needs this key: where the build is"),
    ("{source: editor}", f"cart.source: {EDITOR}"),
    ("{source: pettingzoo, id: x, teams: two}", "cart.teams: must be none, index, or a map"),
    ("{source: pettingzoo, id: x, teams: {a: -1}}", "cart.teams: must be none, index"),
    ("{source: pettingzoo, id: x, api: both}", "cart.api: 'both' is not allowed"),
    ("{source: module, id: my_env}", "cart.id: needs the form module:function, got 'my_env'"),
]
# Text of one more key of an environment of Gymnasium.
IN_GYMNASIUM = [
    ("copies: 0", "cart.copies: must be at least 1, got 0"),
    ("kwargs: 3", "cart.kwargs: needs a map of keys to values"),
    ("kwargs: {render_mode: human}", "environments.cart.kwargs.render_mode: cannot be set"),
    ("kwargs: {a: {b: [.inf]}}", "environments.cart.kwargs.a.b: must be finite, got inf"),
    ("teams: index", f"environments.cart.teams: {TEAMS}"),
    ("copis: 2", "'copis' (value 2); did you mean 'copies'?"),
    ("visual: yess", "cart.visual: 'yess' is not allowed"),
    ("action_scale: 0", "action_scale: must be greater than 0"),
]


def cases() -> Iterator[tuple[str, str, str, str]]:
    """Yield a file's name and text, the start of the message after the name, and later words."""
    for old, new, line, path, *said in MISTAKES:
        start = f":{line}: {path and path + ': '}"
        yield "x.yaml", replaced(FILE, old, new), start, "\n".join(said)
    for text, begin in WHOLE:
        yield "x.yaml", text, begin, ""
    for text, begin in IN_BEHAVIORS:
        yield "x.yaml", f"behaviors: {{A: {text}}}", f":1: behaviors.A.{begin}", ""
    for text, begin in OVER_DEFAULTS:
        defaults = "default_settings: {}\nbehaviors:\n"
        yield "x.yaml", f"{defaults}  A:\n    {text}", f":4: behaviors.A.{begin}", ""
    for text, begin in IN_PARAMETERS:
        yield "x.yaml", f"{P}: {{a: {text}}}", f":1: {P}.a{begin}", ""
    for section, rows in {
        "": IN_PARAMS,
        "demonstrations.expert.": IN_DEMONSTRATIONS,
        "experiments.scratch.": IN_SCRATCH,
        "experiments.cloned.": IN_CLONED,
    }.items():
        for old, new, line, begin in rows:
            yield "params.yaml", replaced(PARAMS, old, new), f":{line}: {section}{begin}", ""
    for old, new, said in IN_SWEEPS:
        sweep = "sweeps.rates" if said.startswith(".") else ""
        yield "params.yaml", replaced(SWEEPS, old, new), ":", sweep + said
    gymnasium = ((f"{{source: gymnasium, id: x, {text}}}", said) for text, said in IN_GYMNASIUM)
    for text, said in (*IN_ENVIRONMENTS, *gymnasium):
        yield "params.yaml", f"environments: {{cart: {text}}}\n", ":1: environments.cart", said


def message_of(read: Callable[[Path], object], file: Path, text: str) -> str:
    """Return the error about a file, without the file's name at its start."""
    file.write_text(text)
    message = refusal(SettingsError, read, file)
    assert message.startswith(str(file))
    return message.removeprefix(str(file))


def replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(("name", "text", "begin", "said"), [*cases()])
def test_settings_mistake_gives_a_one_line_error_with_place_and_remedy(
    name: str, text: str, begin: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config").mkdir()
    for trainer in ("t.yaml", "config/t.yaml"):
        (tmp_path / trainer).write_text("behaviors: {Ball: {max_steps: 5}}")
    read = load_params if name == "params.yaml" else load_run_settings
    message = message_of(read, tmp_path / name, text)
    assert message.startswith(begin)
    assert len(message) < 1000
    for words in said.splitlines():
        assert words in message


@pytest.mark.parametrize("section", ["", "hyperparameters"])
@pytest.mark.parametrize(
    ("trainer", "word", "meant"),
    [
        ("ppo", "n_steps", "of Stable-Baselines3 is hyperparameters.buffer_size here (n_steps x"),
        ("ppo", "ent_coef", "of Stable-Baselines3 is hyperparameters.beta here"),
        ("poca", "entropy_coef", "is hyperparameters.beta here"),
        ("sac", "entropy_coef", "is hyperparameters.init_entcoef here"),
        ("ppo", "clip_range", "of Stable-Baselines3 is hyperparameters.epsilon here"),
        ("ppo", "gae_lambda", "of Stable-Baselines3 is hyperparameters.lambd here"),
        ("ppo", "n_epochs", "of Stable-Baselines3 is hyperparameters.num_epoch here"),
        ("sac", "n_epochs", "num_epoch here, a setting of ppo and poca, not of sac; leave it out"),
        ("sac", "learning_starts", "is hyperparameters.buffer_init_steps here"),
        ("sac", "gradient_steps", "is hyperparameters.steps_per_update here (agent steps for"),
        ("sac", "train_freq", "is hyperparameters.steps_per_update here (agent steps for"),
        (
            "ppo",
            "train_freq",
            "steps_per_update here, a setting of sac and xqc, not of ppo; leave it out",
        ),
        ("ppo", "gamma", "of Stable-Baselines3 is reward_signals.extrinsic.gamma here"),
        ("ppo", "n_layers", "is network_settings.num_layers here"),
        ("ppo", "total_timesteps", "of Stable-Baselines3 is max_steps here"),
        ("ppo", "algo", "of Stable-Baselines3 is trainer_type here"),
        ("sac", "num_epoch", "num_epoch: is a setting of ppo and poca, not of sac; leave it out"),
        ("poca", "shared_critic", "shared_critic: is a setting of ppo, not of poca; leave it out"),
        ("ppo", "save_replay_buffer", "is a setting of sac and xqc, not of ppo; leave it out"),
    ],
)
def test_key_of_another_library_or_trainer_is_refused_and_the_right_key_is_named(
    trainer: str, word: str, meant: str, section: str, tmp_path: Path
) -> None:
    key = f"{word}: 1" if not section else f"{section}: {{{word}: 1}}"
    text = f"behaviors: {{A: {{trainer_type: {trainer}, {key}}}}}"
    message = message_of(load_run_settings, tmp_path / "x.yaml", text)
    assert message.startswith(f":1: behaviors.A{section and '.'}{section}")
    assert word in message
    assert meant in message
    assert "did you mean" not in message


@pytest.mark.parametrize(
    ("text", "signals"),
    [
        (FILE, {"Walker": ["extrinsic", "gail"]}),
        ("behaviors: {}\ndefault_settings: {}\n", {}),
        (
            "default_settings: {}\nbehaviors: {A: {reward_signals: {extrinsic: null, rnd: {}}}}\n",
            {"A": ["rnd"]},
        ),
    ],
    ids=["every block", "no behavior", "a signal that is not inherited"],
)
def test_valid_configuration_files_are_read(text, signals, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    behaviors = load_run_settings(tmp_path / "x.yaml").behaviors
    assert {name: [*behavior.reward_signals] for name, behavior in behaviors.items()} == signals


@pytest.mark.parametrize(
    ("trainer", "network", "option", "message"),
    [
        ("sac", "{memory: {}}", "n_steps: 3", "n_steps: must be 1 with network_settings.memory"),
        ("sac", "{memory: {}}", "held_noise: 4", "held_noise: must be 1 with network_settings."),
        ("ppo", "{}", "desired_kl: 0.01", "desired_kl: adapts the learning rate to the KL; set"),
    ],
)
def test_error_for_settings_that_contradict_each_other_names_the_line_of_one_of_the_settings(
    trainer: str, network: str, option: str, message: str, tmp_path: Path
) -> None:
    text = (
        f"behaviors:\n  B:\n    trainer_type: {trainer}\n    network_settings: {network}\n"
        f"    hyperparameters:\n      batch_size: 128\n      {option}\n"
    )
    said = message_of(load_run_settings, tmp_path / "t.yaml", text)
    assert said.startswith(f":7: behaviors.B.hyperparameters.{message}")
    assert "\n" not in said
