"""Training: the loop that turns environment steps into updates, checkpoints and summaries."""

from pipeline.trainer.api import train
from pipeline.trainer.pretraining import PretrainResult, pretrain
from pipeline.trainer.result import BehaviorResult, TrainResult

__all__ = ["BehaviorResult", "PretrainResult", "TrainResult", "pretrain", "train"]
