"""An unmodified Hugging Face model over two ranks, and the proof that they compute what one device would.

torchrun --nproc-per-node 2 examples/huggingface.py [zero | tensor]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import shardwise

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("this example trains a model of transformers, which is not installed; pip install 'shardwise[hf]'")

PLANS = {
    "zero": {"shard": 2, "zero": 3, "microbatches": 2},
    "tensor": {"tensor": 2, "sequence": True},
}


def llama() -> nn.Module:
    """A small Llama with random weights, nothing downloaded; `from_pretrained` models are taken with their values."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def batch(step: int, rows: int = 8, length: int = 16) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The global batch of a step, the same on every rank: keyword arguments of the model, and the next tokens, which
    count up by a number that the first two tokens tell."""
    drawn = torch.randint(1, 8, (rows, 2), generator=torch.Generator().manual_seed(step))
    tokens = (drawn[:, :1] + drawn[:, 1:] * torch.arange(length + 1)) % 64
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def main(plan: shardwise.Plan, steps: int = 100) -> float:
    """Verifies the plan, trains, and returns the last loss."""
    optimizer = shardwise.AdamW(lr=1e-2)
    exact = plan.replace(precision="fp64")
    report = shardwise.verify(llama(), exact, [batch(step) for step in range(2)], optimizer=optimizer)
    parallel = shardwise.parallelize(llama(), plan, optimizer=optimizer, clip=1.0)
    if parallel.mesh.rank == 0:
        print(report.describe())
    for step in range(steps):
        metrics = parallel.step(parallel.share(batch(step)))
        if parallel.mesh.rank == 0 and (step + 1) % 20 == 0:
            print(metrics)
    parallel.close()
    return metrics.loss


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "zero"
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    main(shardwise.Plan(**PLANS[chosen]))
    if dist.is_initialized():
        dist.destroy_process_group()
