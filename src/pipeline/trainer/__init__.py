"""The loop that turns steps into updates, checkpoints and summaries."""

from pipeline.trainer.api import train
from pipeline.trainer.loop import BehaviorResult, TrainResult
from pipeline.trainer.pretraining import PretrainResult, pretrain

__all__ = ["BehaviorResult", "PretrainResult", "TrainResult", "pretrain", "train"]
