"""A valid trainer configuration with all blocks of settings."""

FILE = """\
behaviors:
  Walker:
    trainer_type: ppo
    hyperparameters:
      batch_size: 64
      buffer_size: 640
      learning_rate: 3e-4
      learning_rate_schedule: linear
      lambd: 0.95
    network_settings:
      hidden_units: 128
      vis_encode_type: simple
      memory:
        memory_size: 128
        sequence_length: 64
    reward_signals:
      extrinsic:
        gamma: 0.99
      gail:
        demo_path: a.demo
        strength: 0.1
    max_steps: 1e6
    threaded: false
    self_play:
      window: 10
    behavioral_cloning:
      demo_path: a.demo
env_settings:
  base_port: 5005
  env_args: [--x]
engine_settings:
  time_scale: 20
environment_parameters:
  mass:
    sampler_type: uniform
    sampler_parameters:
      min_value: 0.5
      max_value: 2
  gap:
    curriculum:
      - name: one
        completion_criteria:
          behavior: Walker
          measure: progress
          threshold: 0.5
        value: 1
      - name: two
        value: 2
checkpoint_settings:
  run_id: a
torch_settings:
  device: cpu
debug: false
"""
