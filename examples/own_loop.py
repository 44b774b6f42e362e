"""A denoising loop of your own around Wan's transformer, which `sparsify` has made sparse.

The step is read from the scheduler, and the guidance branch from `cache_context`, as diffusers' own
pipelines announce it: without that, plans of the two branches would not be told apart.

    python examples/own_loop.py --prompt "a cat walks on the grass"
"""

import argparse

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video

from vidsparse import sparsify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="hub id or folder")
parser.add_argument("--prompt", default="a cat walks on the grass")
parser.add_argument("--frames", type=int, default=81, help="4k+1")
parser.add_argument("--width", type=int, default=832)
parser.add_argument("--height", type=int, default=480)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--guidance", type=float, default=5.0)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="own_loop.mp4")
args = parser.parse_args()

dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
pipe = WanPipeline.from_pretrained(args.model, torch_dtype=dtype)
pipe.vae.to(torch.float32)
pipe.to(args.device)
model, scheduler = pipe.transformer, pipe.scheduler

with torch.no_grad(), sparsify(pipe, "fg-attn", top_p=0.9, dense_steps=0.24) as handle:
    text, negative = pipe.encode_prompt(args.prompt, "", device=args.device)
    latents = pipe.prepare_latents(
        batch_size=1,
        num_channels_latents=model.config.in_channels,
        height=args.height,
        width=args.width,
        num_frames=args.frames,
        dtype=torch.float32,
        device=args.device,
        generator=torch.Generator("cpu").manual_seed(0),
    )
    scheduler.set_timesteps(args.steps, device=args.device)
    for time in scheduler.timesteps:
        inputs = {"hidden_states": latents.to(dtype), "timestep": time[None], "return_dict": False}
        with model.cache_context("cond"):
            wanted = model(encoder_hidden_states=text, **inputs)[0]
        with model.cache_context("uncond"):
            other = model(encoder_hidden_states=negative, **inputs)[0]
        noise = other + args.guidance * (wanted - other)
        latents = scheduler.step(noise, time, latents, return_dict=False)[0]
    print(handle.summary())

    # Wan's latents are scaled channel by channel.
    shape = (1, -1, 1, 1, 1)
    mean = torch.tensor(pipe.vae.config.latents_mean, device=args.device).view(shape)
    std = torch.tensor(pipe.vae.config.latents_std, device=args.device).view(shape)
    frames = pipe.vae.decode(latents.float() * std + mean, return_dict=False)[0]

export_to_video(pipe.video_processor.postprocess_video(frames)[0], args.out, fps=16)
