"""Be an environment that others wrote: those of Gymnasium and PettingZoo, as simulators."""
