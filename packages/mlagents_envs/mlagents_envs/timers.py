"""`mlagents_envs.timers` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing

__getattr__ = _missing.reasons(
    {
        "FuncT": "an alias for type hints",
        "GaugeNode TIMER_FORMAT_VERSION TimerNode TimerStack add_metadata get_timer_root get_timer_stack_for_thread get_timer_tree hierarchical_timer merge_gauges reset_timers set_gauge timed": "measures ML-Agents' own code; here `run_logs/timers.json`, `pipeline timers`",
    },
    __name__,
)
