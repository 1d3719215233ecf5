import pytest

from pipeline.errors import SettingsError
from pipeline.simulators import client, executable, registry


@pytest.mark.parametrize("dash", ["-", "--"])
def test_executable_accepts_arguments_with_one_or_two_dashes(dash):
    words = f"{dash}nographics {dash}batchmode {dash}mlagents-port 7105 {dash}logFile /a/b.log"
    parsed = executable.parse(words.split())
    assert (parsed.port, parsed.log_file, parsed.ignored) == (7105, "/a/b.log", ())
    assert not parsed.compress
    assert executable.parse([f"{dash}compress"]).compress
    unity = ["-screen-width", "640", "-force-vulkan", "-popupwindow", "-Screen-Height=480"]
    parsed = executable.parse([*unity, "-mlagents-port=5005", "--num-agents", "3"])
    assert (parsed.port, parsed.n_agents, parsed.ignored) == (5005, 3, tuple(unity))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-agent 8", "'--num-agent' is not an option; did you mean --num-agents? --help"),
        ("-nographic", "'-nographic' is not an option; did you mean --nographics?"),
        ("--num-agents 8 9", "'9' is not an option; --help lists all options"),
        ("--level 7", "'--level' is not an option; --help lists all options"),
    ],
)
def test_executable_refuses_a_misspelled_argument_in_one_line(words, said, capsys):
    """If the argument were ignored, the training would use the default number of agents."""
    assert executable.main("grid_world", ["--mlagents-port", "5005", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"grid_world: {said}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mlagents-port"], "--mlagents-port: the value is missing"),
        (["--mlagents-port", "x"], "'x' is not a whole number from 1 to 65535"),
        (["--num-agents", "0"], "--num-agents: '0'"),
        (["--connect-timeout", "-1"], "--connect-timeout: '-1'"),
    ],
)
def test_executable_names_the_argument_that_has_an_invalid_value(words, said):
    with pytest.raises(SettingsError, match=said):
        executable.parse(words)


def test_executable_without_a_port_prints_its_usage_and_exits_with_2_and_help_exits_with_0(capsys):
    assert executable.main("grid_world", []) == 2
    assert "--mlagents-port is missing" in capsys.readouterr().err
    assert executable.main("grid_world", ["--help"]) == 0
    assert "--num-agents N" in capsys.readouterr().out


@pytest.mark.parametrize("name", registry.NAMES)
def test_registry_makes_every_simulator_with_the_default_or_the_given_number_of_agents(name):
    for n_agents in (None, 6):
        simulator = registry.make(name, seed=1, n_agents=n_agents)
        n_deciding = sum(len(decisions) for decisions, _ in simulator.reset().values())
        assert n_deciding == (n_agents or registry.entry(name).n_agents)
        simulator.close()


def test_executable_passes_packed_options_and_its_arguments_to_the_simulator(monkeypatch):
    conversations, made = [], []
    monkeypatch.setattr(client, "converse", lambda make, **how: conversations.append((make, how)))
    monkeypatch.setattr(registry, "make", lambda name, **how: made.append((name, how)))
    monkeypatch.setattr(executable, "_set_up_signals", lambda: None)
    for name in ("collect", "freeze"):  # slow with all objects of the tests
        monkeypatch.setattr(executable.gc, name, lambda: None)
    packed = {"id": "CartPole-v1", "visual": "never", "n_agents": 5}
    words = ["--mlagents-port", "7105", "--connect-timeout", "7", "--compress"]
    for more in ([], ["--num-agents", "3"]):
        assert executable.main("gymnasium", [*words, *more], options=packed) == 0
    for (make, how), n_agents in zip(conversations, (5, 3), strict=True):
        assert callable(how.pop("report"))
        assert how == {"port": 7105, "connect_timeout_s": 7.0, "compress": True}
        make(11, 4)
        options = {"id": "CartPole-v1", "visual": "never"}
        assert made.pop() == ("gymnasium", {"seed": 11, "n_agents": 4 * n_agents, **options})
    assert packed["n_agents"] == 5
