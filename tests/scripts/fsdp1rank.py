"""FSDP2 on one rank, blocks recomputed: 24 layers of 1024, 32,768 tokens."""

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

torch.distributed.init_process_group("nccl", init_method="tcp://127.0.0.1:29777", rank=0, world_size=1)
config = AutoConfig.for_model(
    "qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=24, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=True,
)  # fmt: skip
net = AutoModelForCausalLM.from_config(config, dtype=torch.float32).cuda()
for index, layer in enumerate(net.model.layers):
    net.model.layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
for unit in (*net.model.layers, net):
    fully_shard(unit, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
for _ in range(8):
    logits = net(input_ids=torch.randint(1000, (1, 32768), device="cuda"), use_cache=False).logits
    logits.mean().backward()
    del logits
    optimizer.step()
    optimizer.zero_grad()
