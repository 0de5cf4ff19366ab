# https://github.com/open-mmlab/mmsegmentation/tree/main/configs/fcn: R-50-D8 and R-101-D8, 512x1024, 40,000 iterations
import sys

import torch
from torch import distributed, nn
from torch.nn import functional as F


def conv(inputs, outputs, size, stride=1, spread=1):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2 * spread, spread, bias=False), nn.BatchNorm2d(outputs)


def layer(*sizes):
    return [*conv(*sizes), nn.ReLU(inplace=True)]


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride, spread):
        super().__init__()
        middle = layer(width, width, 3, stride, spread)
        self.body = nn.Sequential(*layer(inputs, width, 1), *middle, *conv(width, 4 * width, 1))
        self.shortcut = nn.Sequential(*conv(inputs, 4 * width, 1, stride) if inputs != 4 * width else ())

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def stage(inputs, width, blocks, stride, spread):
    first = Bottleneck(inputs, width, stride, max(spread // 2, 1))
    return nn.Sequential(first, *[Bottleneck(4 * width, width, 1, spread) for _ in range(blocks - 1)])


class Fcn(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.stem = nn.Sequential(*layer(3, 32, 3, 2), *layer(32, 32, 3), *layer(32, 64, 3), nn.MaxPool2d(3, 2, 1))
        self.early = nn.Sequential(stage(64, 64, 3, 1, 1), stage(256, 128, 4, 2, 1), stage(512, 256, blocks, 1, 2))
        self.late = stage(1024, 512, 3, 1, 4)
        self.convs = nn.Sequential(*layer(2048, 512, 3), *layer(512, 512, 3))
        self.joined = nn.Sequential(*layer(2560, 512, 3))
        self.auxiliary = nn.Sequential(*layer(1024, 256, 3), nn.Dropout2d(0.1), nn.Conv2d(256, 19, 1))
        self.classes = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(512, 19, 1))

    def forward(self, images, labels):
        early = self.early(self.stem(images))
        x = self.late(early)
        logits = self.classes(self.joined(torch.cat([x, self.convs(x)], dim=1))), self.auxiliary(early)
        sized = [F.interpolate(out, labels.shape[1:], mode="bilinear", align_corners=False) for out in logits]
        losses = [F.cross_entropy(out, labels, ignore_index=255) for out in sized]
        return losses[0] + 0.4 * losses[1]


distributed.init_process_group("nccl", init_method="tcp://127.0.0.1:29777", rank=0, world_size=1)  # there 4
net = nn.SyncBatchNorm.convert_sync_batchnorm(Fcn(int(sys.argv[1])).cuda())
net = nn.parallel.DistributedDataParallel(net, device_ids=[0], broadcast_buffers=False)
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
for _ in range(8):
    loss = net(torch.randn(2, 3, 512, 1024).cuda(), torch.randint(19, (2, 512, 1024)).cuda())
    opt.zero_grad()
    loss.backward()
    opt.step()
