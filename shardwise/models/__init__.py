"""Plain PyTorch transformers, with no word of parallelism in them."""

from shardwise.models.config import ModelConfig
from shardwise.models.counts import count_parameters, flops_per_token
from shardwise.models.generation import generate
from shardwise.models.huggingface import load_pretrained, save_pretrained
from shardwise.models.rotary import RopeScaling
from shardwise.models.transformer import Transformer, build

__all__ = [
    "ModelConfig",
    "RopeScaling",
    "Transformer",
    "build",
    "count_parameters",
    "flops_per_token",
    "generate",
    "load_pretrained",
    "save_pretrained",
]
