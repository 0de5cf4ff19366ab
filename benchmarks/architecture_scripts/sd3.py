"""Train a small transformer of Stable Diffusion 3, from diffusers, to predict the flow from latents to noise."""

import torch
from diffusers import SD3Transformer2DModel

device = "cuda" if torch.cuda.is_available() else "cpu"
model = SD3Transformer2DModel(
    sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
    num_attention_heads=4, joint_attention_dim=64, caption_projection_dim=64, pooled_projection_dim=64,
    pos_embed_max_size=32,
).to(device)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    latents, noise = torch.randn(2, 4, 4, 32, 32, device=device)
    share = torch.rand(4, device=device)
    noisy = (1 - share)[:, None, None, None] * latents + share[:, None, None, None] * noise
    given = {
        "encoder_hidden_states": torch.randn(4, 32, 64, device=device),
        "pooled_projections": torch.randn(4, 64, device=device),
    }
    predicted = model(noisy, timestep=1000 * share, return_dict=False, **given)[0]
    loss = torch.nn.functional.mse_loss(predicted, noise - latents)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
