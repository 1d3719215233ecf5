"""What `pipeline --help` shows below the list of commands."""

EXAMPLES = """\
the whole pipeline
  pipeline plan                     after editing experiments or seeds in params.yaml
  dvc repro                         run what is out of date, one stage after another
  snakemake --cores 8               the same, in parallel
  pipeline run smoke --cores 2      one subset, experiment, sweep or run of params.yaml
  pipeline sync                     tell one engine what the other has done
  pipeline ui                       curves, parameters and models in the browser

one thing at a time
  pipeline env build balance_ball -o build/balance_ball
  pipeline env fetch URL --sha256 DIGEST
  pipeline env build gymnasium:CartPole-v1 -o build/cartpole --copies 8
  pipeline learn config/ppo/3DBall.yaml --env build/balance_ball --run-id first
  pipeline evaluate results/export/balance_ball_ppo/seed1/3DBall.onnx --env build/balance_ball
  pipeline compare results/train/balance_ball_ppo results/train/balance_ball_bc_ppo
  pipeline config check old/trainer_config.yaml
  pipeline config upgrade old/trainer_config.yaml old/curricula -o config/new.yaml
  pipeline demo record balance_ball -o data/demos/mine.demo --episodes 20
  pipeline demo info data/demos/mine.demo
  pipeline onnx check results/export/balance_ball_ppo/seed1/3DBall.onnx
  pipeline runs balance_ball_ppo-1
  pipeline provenance results/export/balance_ball_ppo/seed1/3DBall.onnx

`pipeline COMMAND --help` says more about each.
"""
