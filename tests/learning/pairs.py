"""An environment of two toys as two independent behaviors."""

from toys import BEHAVIOR

ONE, TWO = "One?team=0", "Two?team=0"


class Pair:
    """Behaviors `One` and `Two`; `lessons` has the received values of the parameter `lesson`."""

    def __init__(self, first, second) -> None:
        self.toys = {ONE: first, TWO: second}
        self.behavior_specs = {name: toy.spec for name, toy in self.toys.items()}
        self.lessons: list[float] = []

    def reset(self):
        return {name: toy.reset()[BEHAVIOR] for name, toy in self.toys.items()}

    def step(self, actions):
        return {
            name: toy.step({BEHAVIOR: actions[name]})[BEHAVIOR] for name, toy in self.toys.items()
        }

    def set_parameter(self, name, value):
        if name == "lesson":
            self.lessons.append(value)

    def close(self):
        pass
