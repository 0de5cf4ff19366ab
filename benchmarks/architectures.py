"""Predict and measure one training step of forty popular architectures at small sizes, on the CPU.

    python benchmarks/architectures.py [NAME ...]

Each model is a folder with a config.json, as `model=hub` takes it, or a script of architecture_scripts/. The
diffusion models need diffusers (`pip install diffusers`), without which they are left out. The prediction is the peak
of a traced step's forward and backward passes, unrounded, without cuBLAS workspaces and kernels' scratch, which a CPU
does not have. The measurement is the peak of the CPU's live tensor bytes in the same passes of the same runner or
script, as a mode counts them that sees each operator. While a mode is active, autograd sums gradients out of place,
as neither CPU nor GPU does otherwise. So a model's bytes are also counted by torch's profiler, which adds the scratch
of CPU kernels, and the smaller count is taken. Both use eager attention, fp32 and no dropout, because a CPU's kernels
for the others keep other tensors. Sizes are as small as a model allows, so activations are the larger part. Prints
one line for each, and how many agree within 0.5 %.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.spec import trial_parser
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.loops import torch_loop
from vramsweep.runners.measure.counters import backward_boundaries
from vramsweep.runners.measure.dispatch_modes import LiveBytes, storages_alive
from vramsweep.runners.model import build
from vramsweep.runners.predict import make_trace
from vramsweep.runners.trace.trace_data import WORKSPACES, Trace

TOLERANCE = 0.005
ON_GPU_ALONE = ("dpo", "grpo")
FOLDER = Path(__file__).with_name("architecture_scripts")
# scripts, each with the library that it needs; TRL's loss of DPO and GRPO is other code on a CPU, without Triton
SCRIPTS = {"unet": "diffusers", "dit": "diffusers", "sd3": "diffusers", "sft": "trl", "dpo": "trl", "grpo": "trl"}
Values = dict[str, Any]

TEXT: Values = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS: Values = {
    **TEXT, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
VISION: Values = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64,
    "patch_size": 8,
}  # fmt: skip
ENCODER: Values = {key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "head_dim")}
SEQ2SEQ: Values = {
    "vocab_size": 512, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
T5: Values = {
    "vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "decoder_start_token_id": 0,
}  # fmt: skip
QWEN_VISION: Values = {
    "depth": 2, "embed_dim": 64, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4,
    "out_hidden_size": 64, "window_size": 32, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0],
    "num_position_embeddings": 1024,
}  # fmt: skip
QWEN_TEXT: Values = {
    **TEXT, "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3]},
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
}  # fmt: skip
QWEN_IDS: Values = {
    "image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503,
}  # fmt: skip
LLAMA = {**TEXT, "model_type": "llama"}

# the class, the model type and the configuration of each
ARCHITECTURES: dict[str, tuple[str, str, Values]] = {
    "llama": ("LlamaForCausalLM", "llama", TEXT),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", TEXT),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", TEXT),
    "mistral": ("MistralForCausalLM", "mistral", TEXT),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", TEXT),
    "gemma3_text": ("Gemma3ForCausalLM", "gemma3_text", TEXT),
    "phi3": ("Phi3ForCausalLM", "phi3", TEXT),
    "gpt2": ("GPT2LMHeadModel", "gpt2", {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("GPTNeoXForCausalLM", "gpt_neox", ENCODER),
    "opt": ("OPTForCausalLM", "opt", {**ENCODER, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": ("BloomForCausalLM", "bloom", {"vocab_size": 512, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconForCausalLM", "falcon", ENCODER),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", TEXT),
    "mamba": ("MambaForCausalLM", "mamba", {**ENCODER, "state_size": 8}),
    "mamba2": ("Mamba2ForCausalLM", "mamba2", {**ENCODER, "num_heads": 8, "head_dim": 16, "n_groups": 1,
                                               "state_size": 8, "chunk_size": 16}),
    "mixtral": ("MixtralForCausalLM", "mixtral", EXPERTS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss", EXPERTS),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3", {
        **EXPERTS, "num_key_value_heads": 4, "n_shared_experts": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "head_dim": 8}),
    "bert": ("BertForMaskedLM", "bert", ENCODER),
    "roberta": ("RobertaForSequenceClassification", "roberta", ENCODER),
    "distilbert": ("DistilBertForMaskedLM", "distilbert", {"vocab_size": 512, "dim": 64, "hidden_dim": 128,
                                                           "n_layers": 2, "n_heads": 4}),
    "electra": ("ElectraForMaskedLM", "electra", {**ENCODER, "embedding_size": 64}),
    "albert": ("AlbertForMaskedLM", "albert", {**ENCODER, "embedding_size": 64}),
    "deberta_v2": ("DebertaV2ForSequenceClassification", "deberta-v2", {
        **ENCODER, "relative_attention": True, "position_buckets": 32, "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm", "share_att_key": True}),
    "modernbert": ("ModernBertForMaskedLM", "modernbert", {**ENCODER, "cls_token_id": 1, "sep_token_id": 2}),
    "xlm_roberta": ("XLMRobertaForTokenClassification", "xlm-roberta", ENCODER),
    "t5": ("T5ForConditionalGeneration", "t5", T5),
    "mt5": ("MT5ForConditionalGeneration", "mt5", {**T5, "feed_forward_proj": "gated-gelu"}),
    "bart": ("BartForConditionalGeneration", "bart", SEQ2SEQ),
    "pegasus": ("PegasusForConditionalGeneration", "pegasus", SEQ2SEQ),
    "vit": ("ViTForImageClassification", "vit", VISION),
    "deit": ("DeiTForImageClassification", "deit", VISION),
    "dinov2": ("Dinov2ForImageClassification", "dinov2", VISION),
    "swin": ("SwinForImageClassification", "swin", {"image_size": 64, "patch_size": 4, "embed_dim": 32,
                                                    "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
    "resnet": ("ResNetForImageClassification", "resnet", {"embedding_size": 16, "hidden_sizes": [32, 64],
                                                          "depths": [1, 1], "image_size": 64}),
    "convnext": ("ConvNextForImageClassification", "convnext", {"hidden_sizes": [16, 32], "depths": [1, 1],
                                                                "num_stages": 2, "image_size": 64}),
    "llava": ("LlavaForConditionalGeneration", "llava", {
        "text_config": LLAMA, "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 64},
        "image_token_index": 500, "image_seq_length": 64}),
    "paligemma": ("PaliGemmaForConditionalGeneration", "paligemma", {
        "text_config": {**TEXT, "model_type": "gemma"}, "projection_dim": 64, "image_token_index": 500,
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "projection_dim": 64}}),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3", {
        "text_config": TEXT, "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 16, "image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502}),
    "idefics3": ("Idefics3ForConditionalGeneration", "idefics3", {
        "text_config": LLAMA, "vision_config": VISION, "scale_factor": 2, "image_token_id": 500, "pad_token_id": 0}),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "qwen2_vl", {
        "text_config": QWEN_TEXT, "vision_config": QWEN_VISION, **QWEN_IDS}),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", {
        "text_config": QWEN_TEXT, "vision_config": QWEN_VISION, **QWEN_IDS}),
    "internvl": ("InternVLForConditionalGeneration", "internvl", {
        "text_config": {**TEXT, "model_type": "qwen2"}, "image_seq_length": 16, "image_token_id": 500,
        "vision_config": {**VISION, "image_size": [64, 64], "patch_size": [8, 8]}}),
    "whisper": ("WhisperForConditionalGeneration", "whisper", {
        **SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": 512}),
}  # fmt: skip


def main(words: list[str]) -> int:
    """Print the table; return 1 if fewer than 34 architectures agree, when all of them ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; all by default")
    parser.add_argument("--measure", metavar="SCRIPT", help=argparse.SUPPRESS)
    if (chosen := parser.parse_args(words)).measure:
        print(measure_script(chosen.measure))
        return 0
    names = [name for name in chosen.names or [*ARCHITECTURES, *SCRIPTS] if not _lacks_library(name)]
    agree = alone = 0
    print(f"{'architecture':14} {'predicted':>12} {'measured':>12} {'error':>9}")
    for name in names:
        try:
            predicted, measured = compare(name)
        except Exception as error:
            traceback.print_exc()
            print(f"{name:14} {type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.150}", flush=True)
            continue
        if measured is None:
            print(f"{name:14} {predicted:12,} {'–':>12}", flush=True)
            alone += 1
            continue
        agree += abs(predicted / measured - 1) <= TOLERANCE
        print(f"{name:14} {predicted:12,} {measured:12,} {predicted / measured - 1:+9.3%}", flush=True)
    print(f"{agree} of {len(names) - alone} agree within {TOLERANCE:.1%}")
    return int(agree < min(34, len(names) - alone))


def compare(name: str) -> tuple[int, int | None]:
    """Return the bytes predicted and measured, None if a CPU runs other code.

    Raises InvalidTrial if the model cannot be predicted.
    """
    with tempfile.TemporaryDirectory() as folder:
        if name in SCRIPTS:
            return compare_script(FOLDER / f"{name}.py", Path(folder))
        write_config(name, Path(folder))
        return predict(make_trial(folder, "simulated"), Path(folder)), measure(make_trial(folder, "cpu"), Path(folder))


def compare_script(script: Path, folder: Path) -> tuple[int, int | None]:
    """Return the bytes of a script's third step, predicted here and measured in a process of its own."""
    values = make_trial(str(folder), "simulated").model_dump()
    values |= {"seq_len": 1, "micro_batch": 1, "attention": "sdpa", "optimizer": "default"}
    values |= {"model": {"name": "script", "model_type": None}}
    values["runner"] = {"name": "script", "command": f"{sys.executable} {script}"}
    predicted = predict(trial_parser.parse(values), folder)
    if script.stem in ON_GPU_ALONE:
        return predicted, None
    measured = subprocess.run(
        [sys.executable, __file__, "--measure", str(script)], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    return predicted, int(measured.stdout.splitlines()[-1])


def measure_script(script: str) -> int:
    """Run the script on the CPU, and return the most live bytes from the second optimizer step to the third."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    peaks: list[int] = []
    with LiveBytes(storages_alive()) as live:
        hooks = (
            register_optimizer_step_pre_hook(lambda *_: peaks.append(live.take())),
            register_optimizer_step_post_hook(lambda *_: (live.take(), None)[1]),
        )
        sys.path.insert(0, str(FOLDER))
        runpy.run_path(script, run_name="__main__")
        for hook in hooks:
            hook.remove()
    return peaks[2]


def write_config(name: str, folder: Path) -> None:
    """Write the architecture's config.json, without dropout."""
    from transformers import AutoConfig

    architecture, model_type, values = ARCHITECTURES[name]
    config = AutoConfig.for_model(model_type, **values).to_dict()
    _stop_dropout(config)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))


def make_trial(folder: str, device: str) -> Trial:
    """Return the trial of a folder's model: two samples of 320 tokens."""
    gpu = {"gpu": "a100-80gb"} if device == "simulated" else {}
    values: Values = {
        "model": {"name": "one", "model_type": None, "config": {}, "path": folder, "max_positions": None},
        "seq_len": 320, "micro_batch": 2, "precision": "fp32", "attention": "eager", "runner": {"name": "torch"},
        "allocator": {"name": "default", "conf": ""}, "device": {"name": device, **gpu},
        "protocol": {"name": "brief", "warmup_steps": 1, "measured_steps": 1},
    }  # fmt: skip
    return trial_parser.parse(values)


def predict(trial: Trial, folder: Path) -> int:
    """Return the most bytes in the traced last step's forward and backward passes."""
    trace, _ = make_trace.trace_trial(trial, gpu_lookup.gpu_named("a100-80gb"), folder)
    begin, end = trace.marks[-4].end, trace.marks[-2].end
    live = most = 0
    for number, event in enumerate(trace.events[:end]):
        live += _own_size(trace, abs(event) - 1) * (1 if event > 0 else -1) if event else 0
        most = max(most, live) if number >= begin else 0
    return most


def measure(trial: Trial, folder: Path) -> int:
    """Return the most bytes that live in the last step's passes, as the lower of both counts has them."""
    return min(_measure(trial, folder, kind(trial.steps())) for kind in (Meter, ProfiledMeter))


def _measure(trial: Trial, folder: Path, meter: "Meter") -> int:
    build.prepare(trial)
    with backward_boundaries(lambda: None, meter.take):
        torch_loop.run(trial, torch.device("cpu"), meter, folder)
    pool = [tensor.untyped_storage() for sample in build.data(trial).samples for tensor in sample.values()]
    return meter.most - sum({storage._cdata: storage.nbytes() for storage in pool}.values())  # they stay on the host


class Meter:
    """StepMeter that counts the live bytes of the last step's passes."""

    rank = 0

    def __init__(self, steps: int) -> None:
        self.left, self.most, self._live = steps, 0, LiveBytes(storages_alive())

    def built(self, describe: Callable[[], Any], skipped: Callable[[], int | None] | None = None) -> None:
        """Ignore what was built."""

    def step_begin(self) -> None:
        """Begin to count, at the last step."""
        self.left -= 1
        if not self.left:
            self._live.__enter__()

    def fed(self, batch: Any) -> None:
        """Ignore the batch."""

    def run_pass(self, one: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run the pass."""
        return one()

    def take(self) -> None:
        """Keep the peak at the end of the backward pass."""
        if not self.left:
            self.most = self._live.take()

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        """Stop counting."""
        if not self.left:
            self._live.__exit__(None, None, None)


class ProfiledMeter(Meter):
    """StepMeter that counts the same by what torch's profiler sees the CPU's allocator do."""

    def step_begin(self) -> None:
        """Begin to count, at the last step."""
        self.left -= 1
        if not self.left:
            with self._live as live:
                self.most = live.live
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ).__enter__()

    def take(self) -> None:
        """Keep the peak at the end of the backward pass."""
        if self.left:
            return
        self._profile.__exit__(None, None, None)
        found = self._profile.profiler.kineto_results.events()
        changes = sorted((one for one in found if one.name() == "[memory]"), key=lambda one: one.start_ns())
        self.most = max(itertools.accumulate((one.nbytes() for one in changes), initial=self.most))

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        """Do nothing, because counting has stopped."""


def _lacks_library(name: str) -> bool:
    lacks = name in SCRIPTS and importlib.util.find_spec(SCRIPTS[name]) is None
    if lacks:
        print(f"{name}: left out, because {SCRIPTS[name]} is not installed")
    return lacks


def _own_size(trace: Trace, number: int) -> int:
    scratch = trace.makers[trace.origins[number]].operator.count("(scratch)")
    return 0 if scratch or trace.categories[number] == WORKSPACES else trace.sizes[number]


def _stop_dropout(config: Values) -> None:
    """Set every rate of dropout to 0, in configurations inside too."""
    for key, value in config.items():
        if isinstance(value, dict):
            _stop_dropout(value)
        elif isinstance(value, float) and ("drop" in key or key.endswith("pdrop")):
            config[key] = 0.0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
