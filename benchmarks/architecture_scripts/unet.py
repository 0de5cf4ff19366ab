"""Train a small U-Net of diffusers to predict the noise in images."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.models.attention_processor import Attention, AttnProcessor

device = "cuda" if torch.cuda.is_available() else "cpu"
model = UNet2DModel(
    sample_size=64, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
).to(device)  # fmt: skip
for module in model.modules():
    if isinstance(module, Attention):  # without a fused kernel, because a CPU's keeps other tensors
        module.set_processor(AttnProcessor())
scheduler = DDPMScheduler()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    images, noise = torch.randn(2, 4, 3, 64, 64, device=device)
    times = torch.randint(0, 1000, (4,), device=device)
    noisy = scheduler.add_noise(images, noise, times)
    predicted = model(noisy, times, return_dict=False)[0]
    loss = torch.nn.functional.mse_loss(predicted, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
