"""Third-party environments, of Gymnasium and PettingZoo, as simulators."""
