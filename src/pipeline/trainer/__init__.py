"""Training: the loop that turns environment steps into updates, checkpoints and summaries."""

from pipeline.tracking.result import BehaviorResult, TrainResult
from pipeline.trainer.api import train
from pipeline.trainer.environment import JobSpec
from pipeline.trainer.pretraining import PretrainResult, pretrain

__all__ = ["BehaviorResult", "JobSpec", "PretrainResult", "TrainResult", "pretrain", "train"]
