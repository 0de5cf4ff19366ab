"""Train a small diffusion transformer (DiT) of diffusers, conditioned on classes, to predict the noise in latents."""

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
from diffusers.models.attention_processor import AttnProcessor

device = "cuda" if torch.cuda.is_available() else "cpu"
model = DiTTransformer2DModel(
    num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=32, patch_size=2,
    num_embeds_ada_norm=1000, norm_num_groups=8,
).to(device)  # fmt: skip
for block in model.transformer_blocks:  # without a fused kernel, because a CPU's keeps other tensors
    block.attn1.set_processor(AttnProcessor())
scheduler = DDPMScheduler()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    latents, noise = torch.randn(2, 4, 4, 32, 32, device=device)
    times, classes = torch.randint(0, 1000, (2, 4), device=device)
    noisy = scheduler.add_noise(latents, noise, times)
    predicted = model(noisy, timestep=times, class_labels=classes, return_dict=False)[0]
    loss = torch.nn.functional.mse_loss(predicted[:, :4], noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
