import sys
from pathlib import Path

import pytest

from pipeline.cli import main as cli
from pipeline.dag.stages.check import check_ids
from pipeline.dag.stages.demos import record
from pipeline.envs.executable import Build
from pipeline.errors import SettingsError, StageError
from pipeline.settings.project.params import load_params
from pipeline.simulators.bridges import naming

FILE = """\
environments:
  cart:
    source: gymnasium
    id: CartPol-v1
"""


@pytest.mark.parametrize(
    ("text", "said", "right"),
    [
        (
            "\n    source: gymnasium\n    id: CartPol-v1",
            ":4: environments.cart.id: Gymnasium has no environment 'CartPol-v1'; ",
            "{source: gymnasium, id: CartPole-v1}",
        ),
        (
            "\n    source: pettingzoo\n    id: classic.tictacto_v3",
            ":4: environments.cart.id: PettingZoo has no environment 'classic.tictacto_v3'; ",
            "{source: pettingzoo, id: pettingzoo.classic.tictactoe_v3}",
        ),
        ("{source: builtin}", ":2: environments.cart: unknown simulator 'cart'", "balance_ball"),
        ("balnce_ball", ":2: environments.cart: unknown simulator 'balnce_ball'", "balance_ball"),
        (
            "gymnasium:CartPol-v1",
            ":2: environments.cart: Gymnasium has no environment 'CartPol-v1'",
            "gymnasium:CartPole-v1",
        ),
        (
            "{source: module, id: 'json:mak'}",
            ":2: environments.cart.id: json:mak: ",
            "balance_ball",
        ),
    ],
)
def test_unknown_third_party_environment_is_reported_with_its_line_and_a_suggestion(
    tmp_path, text, said, right
):
    file = tmp_path / "params.yaml"
    file.write_text(f"environments:\n  cart: {text}\n")
    with pytest.raises(SettingsError) as refused:
        check_ids(load_params(file))
    assert str(refused.value).startswith(f"{file}{said}")
    if said.endswith("; "):
        assert f"did you mean '{right[:-1].rpartition(' ')[2]}'" in str(refused.value)
    file.write_text(f"environments:\n  cart: {right}\n")
    check_ids(load_params(file))


def test_environment_module_is_searched_in_the_folder_of_params_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "cart_of_this_test.py").write_text(
        "import gymnasium\ngymnasium.register('Mine-v0', entry_point='x:Y')\n"
    )
    file = tmp_path / "params.yaml"
    file.write_text(FILE.replace("CartPol-v1", "cart_of_this_test:Mine-v0"))
    check_ids(load_params(file))


def test_plan_refuses_an_unknown_environment_id_with_exit_code_2(tmp_path, monkeypatch, capsys):
    (tmp_path / "params.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan"]) == 2
    assert "did you mean 'CartPole-v1'" in capsys.readouterr().err
    assert not Path("workflow").exists()


def test_recording_of_demonstrations_is_refused_for_third_party_environments(tmp_path):
    build = Build(file=tmp_path / "cart", args=(), simulator=None)
    with pytest.raises(StageError, match="cart: only built-in simulators have an expert"):
        record(build, tmp_path / "x.demo", episodes=1, seed=0, log_folder=tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gymnasium:CartPol-v1"], "'CartPole-v1'"),
        (["gymnasium:CartPole-v1", "--arg", "foo=1"], "unexpected keyword argument 'foo'"),
        (["gymnasium:CartPole-v1", "--arg", "foo"], "--arg foo: needs the form KEY=VALUE"),
        (["gymnasium:CartPole-v1", "--option", "teams=index"], "belongs to the source 'pettingz"),
        (["gymnasium:CartPole-v1", "--copies", "0"], "copies: must be at least 1, got 0"),
        (["balance_ball", "--arg", "x=1"], "are only for gymnasium:ID, pettingzoo:ID and module"),
        (["balance_ball", "--copies", "0"], "--copies: must be at least 1, got 0"),
        (["gymnasium:nothing"], "no environment 'nothing'"),
        (["gym:CartPole-v1"], "did you mean 'gymnasium:CartPole-v1'?"),
        (["./balance_ball"], "./balance_ball: is a path, so there is nothing to build"),
        (["no_such_module:make"], "there is no no_such_module.py in the current folder"),
    ],
)
def test_env_build_reports_a_mistake_in_one_line_with_exit_code_2(tmp_path, capsys, words, said):
    assert cli.main(["env", "build", *words, "-o", str(tmp_path / "env")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "find", "env_id", "extra"),
    [
        ("gymnasium", naming.registered, "CartPole-v1", "envs"),
        ("pettingzoo", naming.full_name, "classic.tictactoe_v3", "envs"),
        ("mpe2", naming.full_name, "mpe2.simple_tag_v3", "games"),
    ],
)
def test_missing_package_of_an_environment_is_named_with_the_command_that_installs_it(
    monkeypatch, package, find, env_id, extra
):
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(name=name)

    for name in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    message = (
        f"{env_id}: needs the package {package}, which is not installed: pip install 'rl-pipel"
    )
    with pytest.raises(SettingsError) as refused:
        find(env_id)
    assert str(refused.value).startswith(message)
    assert f"[{extra}]'" in str(refused.value)


def test_env_list_shows_the_forms_of_third_party_environment_ids(capsys):
    assert cli.main(["env", "list"]) == 0
    text = capsys.readouterr().out
    for name in ("balance_ball", "grid_world", "gymnasium:ID", "pettingzoo:ID", "MODULE:FUNCTION"):
        assert name in text
