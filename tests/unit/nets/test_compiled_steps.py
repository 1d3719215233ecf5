"""Compiled gradient steps equal steps by `backward`, after changes of all that they depend on.

Only the traced operations are compared: compiling them takes seconds, and is left out.
"""

import pytest
import torch
from torch import nn

from pipeline.nets.fast import compiled
from pipeline.nets.fast.adam import FlatAdam, Length
from pipeline.nets.fast.compiled import CompiledSteps
from pipeline.nets.layers import IS_TRACED


class Toy(nn.Module):
    """Two layers of one shape as a pair, a scale, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.idle = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(2, 1)
        self.register_buffer("scale", torch.ones(()))
        pairs = [(self.one.weight, self.two.weight)]
        self.optimizer = FlatAdam(self.parameters(), learning_rate=0.1, pairs=pairs)
        self.traced: list[bool] = []

    def losses(self, columns):
        self.traced.append(IS_TRACED.get())
        both = columns["x"] @ self.optimizer.paired[0].transpose(1, 2)
        error = both[0] + self.one.bias * self.scale - columns["y"].mean() - self.two.bias
        single = columns["x"] @ self.two.weight.t()  # also used by itself
        loss = error.square().mean() + both[1].square().mean() + single.square().mean()
        return loss, (error,)


@pytest.fixture
def traced(monkeypatch):
    """Return the programs that were made; they are traced but not compiled."""
    programs = []

    def kept(made):
        programs.append(made)
        return made

    monkeypatch.setattr(torch, "compile", lambda made, **_: kept(made))
    monkeypatch.setattr(compiled, "_inner_program", lambda made, *_: kept(made.forward))
    return programs


# Rows, other rows, the largest norm, the learning rate, and a factor of other processes.
STEPS = [
    (4, 4, None, 0.1, None),
    (4, 4, 0.05, 0.1, None),
    (4, 4, None, 0.02, None),
    (6, 4, None, 0.02, None),
    (4, 4, None, 0.05, 0.5),
    (4, 4, 0.05, 0.05, 0.5),
    (4, 4, 0.05, 0.1, None),
    (6, 4, None, 0.3, None),
    (4, 4, 50.0, 0.1, None),
]


def stepped(toy, number):
    """Make one of the steps above; return results and the optimizer's tensors after it."""
    n, n_other, max_norm, toy.optimizer.learning_rate, factor = STEPS[number]
    toy.optimizer.average = None if factor is None else (lambda gradient: gradient.mul_(factor))
    draw = torch.Generator().manual_seed(number)
    x, y = torch.randn(n, 3, generator=draw), torch.randn(n_other, 1, generator=draw)
    toy.scale.fill_(1.0 + number)
    results = toy.optimizer.descend(toy.losses, {"x": x, "y": y}, max_norm=max_norm)
    kept = toy.optimizer.state_dict()["state"][0]
    return [*results, toy.optimizer.flat.detach(), toy.optimizer.gradient, *kept.values()]


def test_each_compiled_step_equals_the_uncompiled_step_after_any_change_of_the_inputs(traced):
    plain, fast, other = Toy(), Toy(), Toy()
    fast.optimizer.compiled = CompiledSteps(fast.optimizer)
    other.optimizer.compiled = CompiledSteps(other.optimizer)
    stepped(other, 3)
    untouched = other.optimizer.flat.detach().clone()
    assert len(traced) == 1
    spent = []
    for number in range(len(STEPS)):
        assert_steps_agree(plain, fast, number)
        spent.append(fast.optimizer.compile_s)
    assert len(traced) == 7
    assert torch.equal(other.optimizer.flat, untouched)
    assert sorted(spent) == spent
    assert len(set(spent)) == 6, "each program's time is added"
    assert plain.traced == [False] * len(STEPS)
    assert sum(fast.traced) == 6, "known while a loss is traced, and not otherwise"
    assert not IS_TRACED.get()


def assert_steps_agree(plain, fast, number):
    for wanted, got in zip(stepped(plain, number), stepped(fast, number), strict=True):
        torch.testing.assert_close(got, wanted)
        assert not got.requires_grad


def test_compiled_and_uncompiled_steps_can_alternate_and_only_recurring_shapes_are_compiled(traced):
    """As in a run that is resumed with another setting."""
    plain, mixed = Toy(), Toy()
    assert_steps_agree(plain, mixed, 0)
    mixed.optimizer.load_state_dict(plain.optimizer.state_dict())
    programs = CompiledSteps(mixed.optimizer)
    for number, chosen in enumerate((programs, None, programs)):
        mixed.optimizer.compiled = chosen
        assert_steps_agree(plain, mixed, number)
    assert len(traced) == 1
    columns = {"x": torch.ones(2, 3), "y": torch.ones(2, 1)}
    mixed.optimizer.descend(mixed.losses, columns, lengths=None)
    assert len(traced) == 1


def test_different_lengths_that_are_equal_by_chance_stay_separate_in_the_compiled_program(traced):
    plain, fast = Toy(), Toy()
    fast.optimizer.compiled = CompiledSteps(fast.optimizer)
    lengths = {"x": Length("x", 4), "y": Length("y", 4)}
    for n, n_other in ((4, 4), (7, 2), (2, 9)):  # by one program
        columns = {"x": torch.full((n, 3), 0.5), "y": torch.arange(float(n_other))[:, None]}
        (wanted,) = plain.optimizer.descend(plain.losses, columns)
        (got,) = fast.optimizer.descend(fast.losses, columns, lengths=lengths)
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(fast.optimizer.flat, plain.optimizer.flat)
    assert len(traced) == 1


def test_a_compiled_program_reads_parameters_and_buffers_as_they_are_now():
    """This compiles, unlike the tests above: torch would take what a loss reads for constants."""
    plain, fast = Toy(), Toy()
    fast.optimizer.compiled = CompiledSteps(fast.optimizer)
    for number in (0, 2, 0):
        assert_steps_agree(plain, fast, number)


def test_a_step_that_cannot_be_compiled_is_made_without(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("Python.h: no such file\nand more")

    monkeypatch.setattr(compiled, "_inner_program", fail)
    plain, fast = Toy(), Toy()
    fast.optimizer.compiled = CompiledSteps(fast.optimizer)
    for number in (0, 2):
        assert_steps_agree(plain, fast, number)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "Gradient steps are not compiled from now on: Python.h: no such file"
    ]
