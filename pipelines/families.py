"""What is known of each model family without loading it."""

from __future__ import annotations

from typing import Final

from vidsparse.pipelines.family import Defaults, Family

# the settings of sparse attention are FG-Attn's (section 6) where it has any: the first 24 % of
# steps dense on Wan and LTX-2, 10 % on HunyuanVideo; top-p 0.9 and 16x16 tiles, the most accurate
# of its sizes, are the method's own defaults. the order is SpargeAttn's (section 3.7).

WAN: Final = Family(
    name="Wan",
    adapter="wan",
    text_to_video=("WanPipeline",),
    image_to_video=("WanImageToVideoPipeline",),
    image_twin="WanImageToVideoPipeline",
    # TI2V-5B. other text-to-video weights have no channels for an image.
    image_twin_if="expand_timesteps",
    last_image="WanImageToVideoPipeline",
    # Wan-Animate, ChronoEdit and Lucy Edit have Wan's blocks, in transformers of their own or in
    # Wan's.
    other=(
        "WanVideoToVideoPipeline",
        "WanVACEPipeline",
        "WanAnimatePipeline",
        "ChronoEditPipeline",
        "LucyEditPipeline",
        "WanModularPipeline",
        "WanImage2VideoModularPipeline",
        "Wan22ModularPipeline",
        "Wan22Image2VideoModularPipeline",
        "Wan22VaceModularPipeline",
    ),
    refused=dict.fromkeys(
        ("WanAnimate2ModularPipeline", "WanAnimate2DistilledModularPipeline"),
        "attends by a mask, a frame to the video and to its own frame of a reference",
    ),
    vae_fp32=True,
    caches=("first-block", "taylorseer", "guidance"),
    # the call defaults of diffusers' WanPipeline, and the frame rate Wan was trained at.
    defaults=Defaults(
        family="Wan",
        frames=81,
        width=832,
        height=480,
        steps=50,
        guidance=5.0,
        fps=16,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.24,
        source="FG-Attn, section 6",
    ),
)

SKYREELS_V2: Final = Family(
    name="SkyReels-V2",
    adapter="skyreels_v2",
    text_to_video=("SkyReelsV2Pipeline",),
    image_to_video=("SkyReelsV2ImageToVideoPipeline",),
    other=(
        "SkyReelsV2DiffusionForcingPipeline",
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    ),
    vae_fp32=True,
    caches=("taylorseer", "guidance"),
    # the call defaults of diffusers' SkyReelsV2Pipeline, and the frame rate of its examples.
    defaults=Defaults(
        family="SkyReels-V2",
        frames=97,
        width=960,
        height=544,
        steps=50,
        guidance=6.0,
        fps=24,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.24,
        source="as Wan, whose blocks it has",
    ),
)

ANYFLOW: Final = Family(
    name="AnyFlow",
    adapter="anyflow",
    text_to_video=("AnyFlowPipeline",),
    refused={"AnyFlowFARPipeline": "makes frames in turn, of which none attends to later ones"},
    vae_fp32=True,
    caches=("taylorseer",),
    # the call defaults of diffusers' AnyFlowPipeline, whose guidance is distilled, and Wan's rate.
    defaults=Defaults(
        family="AnyFlow",
        frames=81,
        width=832,
        height=480,
        steps=50,
        guidance=1.0,
        fps=16,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.24,
        source="as Wan, whose blocks it has",
    ),
)

HUNYUAN_VIDEO: Final = Family(
    name="HunyuanVideo",
    adapter="hunyuan_video",
    text_to_video=("HunyuanVideoPipeline",),
    image_to_video=("HunyuanVideoImageToVideoPipeline",),
    other=("HunyuanSkyreelsImageToVideoPipeline", "HunyuanVideoFramepackPipeline"),
    vae_tiling=True,
    caches=("first-block", "taylorseer", "guidance"),
    # the call defaults of diffusers' HunyuanVideoPipeline, and the frame rate of its training.
    defaults=Defaults(
        family="HunyuanVideo",
        frames=129,
        width=1280,
        height=720,
        steps=50,
        guidance=6.0,
        embedded=True,
        fps=24,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.1,
        source="FG-Attn, section 6",
    ),
)

HUNYUAN_VIDEO_15: Final = Family(
    name="HunyuanVideo 1.5",
    adapter="hunyuan_video15",
    text_to_video=("HunyuanVideo15Pipeline",),
    image_to_video=("HunyuanVideo15ImageToVideoPipeline",),
    other=("HunyuanVideo15ModularPipeline",),
    vae_tiling=True,
    caches=("taylorseer", "guidance"),
    # the call defaults of diffusers' HunyuanVideo15Pipeline at its smaller size.
    defaults=Defaults(
        family="HunyuanVideo 1.5",
        frames=121,
        width=848,
        height=480,
        steps=50,
        guidance=6.0,
        fps=24,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.1,
        source="as HunyuanVideo",
    ),
)

HELIOS: Final = Family(
    name="Helios",
    adapter="helios",
    # a video is so many sections of 33 frames, less up to three: generate asks for none such.
    text_to_video=(),
    other=(
        "HeliosPipeline",
        "HeliosPyramidPipeline",
        "HeliosModularPipeline",
        "HeliosPyramidModularPipeline",
        "HeliosPyramidDistilledModularPipeline",
    ),
    vae_fp32=True,
    caches=("taylorseer", "guidance"),
    # the call defaults of diffusers' HeliosPipeline, and the frame rate of its examples.
    defaults=Defaults(
        family="Helios",
        frames=129,
        width=640,
        height=384,
        steps=50,
        guidance=5.0,
        fps=24,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.24,
        source="as Wan, whose blocks it has",
    ),
)

COGVIDEOX: Final = Family(
    name="CogVideoX",
    adapter="cogvideox",
    text_to_video=("CogVideoXPipeline",),
    image_to_video=("CogVideoXImageToVideoPipeline",),
    other=(
        "CogVideoXVideoToVideoPipeline",
        "CogVideoXFunControlPipeline",
        "ConsisIDPipeline",
    ),
    vae_tiling=True,
    # those of CogVideoX 1.0. its VAE takes latent frames in pairs after the first: 8k+1 frames.
    defaults=Defaults(
        family="CogVideoX",
        frames=49,
        width=720,
        height=480,
        steps=50,
        guidance=6.0,
        fps=8,
        frame_factor=8,
        size_factor=16,
        dense_steps=0.2,
        source="between FG-Attn's shares for other models; none is published for this one",
    ),
)

MOCHI: Final = Family(
    name="Mochi",
    adapter="mochi",
    text_to_video=("MochiPipeline",),
    vae_tiling=True,
    # the call defaults of diffusers' MochiPipeline, at the 5.4 seconds that the model was made for.
    defaults=Defaults(
        family="Mochi",
        frames=163,
        width=848,
        height=480,
        steps=64,
        guidance=4.5,
        fps=30,
        frame_factor=6,
        size_factor=16,
        dense_steps=0.2,
        source="between FG-Attn's shares for other models; none is published for this one",
    ),
)

ALLEGRO: Final = Family(
    name="Allegro",
    adapter="allegro",
    text_to_video=("AllegroPipeline",),
    # it decodes by tiles alone.
    vae_tiling=True,
    caches=("taylorseer",),
    # the call defaults of diffusers' AllegroPipeline, save that its 88 frames are 22 of the latent
    # as 85 are.
    defaults=Defaults(
        family="Allegro",
        frames=85,
        width=1280,
        height=720,
        steps=100,
        guidance=7.5,
        fps=15,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.2,
        source="between FG-Attn's shares for other models; none is published for this one",
    ),
)

EASYANIMATE: Final = Family(
    name="EasyAnimate",
    adapter="easyanimate",
    text_to_video=("EasyAnimatePipeline",),
    # EasyAnimateControlPipeline calls its own encode_prompt wrongly in diffusers 0.42.
    other=("EasyAnimateInpaintPipeline",),
    vae_tiling=True,
    caches=("taylorseer",),
    # the call defaults of diffusers' EasyAnimatePipeline.
    defaults=Defaults(
        family="EasyAnimate",
        frames=49,
        width=512,
        height=512,
        steps=50,
        guidance=5.0,
        fps=8,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.2,
        source="between FG-Attn's shares for other models; none is published for this one",
    ),
)

LTX: Final = Family(
    name="LTX-Video",
    adapter="ltx",
    text_to_video=("LTXPipeline",),
    image_to_video=("LTXImageToVideoPipeline",),
    image_twin="LTXImageToVideoPipeline",
    other=("LTXConditionPipeline", "LTXI2VLongMultiPromptPipeline", "LTXModularPipeline"),
    # the call defaults of diffusers' LTXPipeline.
    defaults=Defaults(
        family="LTX-Video",
        frames=161,
        width=704,
        height=512,
        steps=50,
        guidance=3.0,
        fps=25,
        frame_factor=8,
        size_factor=32,
        dense_steps=0.24,
        source="as LTX-2",
    ),
)

LTX_2: Final = Family(
    name="LTX-2",
    adapter="ltx2",
    text_to_video=("LTX2Pipeline",),
    image_to_video=("LTX2ConditionPipeline", "LTX2ImageToVideoPipeline"),
    # of a first frame alone both make the same, each from noise in an order of its own.
    image_twin="LTX2ConditionPipeline",
    last_image="LTX2ConditionPipeline",
    keyframes="LTX2ConditionPipeline",
    # LTX-2.5 has the same transformer.
    other=(
        "LTX2InContextPipeline",
        "LTX2HDRPipeline",
        "LTX2DFRPipeline",
        "LTX2DFRTemporalRefinePipeline",
        "LTX2ModularPipeline",
        "LTX25ModularPipeline",
    ),
    refused={
        "EchoModularPipeline": "has no scheduler and goes by a list of noise levels alone",
        "LTX2VideoDiffusionDecodePipeline": "decodes by attention among neighbours",
    },
    libraries=("ltx2",),
    vae_tiling=True,
    caches=("taylorseer",),
    sound=True,
    # the call defaults of diffusers' LTX2Pipeline.
    defaults=Defaults(
        family="LTX-2",
        frames=121,
        width=768,
        height=512,
        steps=30,
        guidance=3.0,
        fps=24,
        frame_factor=8,
        size_factor=32,
        dense_steps=0.24,
        source="FG-Attn, section 6",
    ),
)

COSMOS: Final = Family(
    name="Cosmos",
    adapter="cosmos",
    # generate runs none: diffusers wants NVIDIA's guardrail beside them, a package of its own.
    text_to_video=(),
    other=(
        "CosmosTextToWorldPipeline",
        "CosmosVideoToWorldPipeline",
        "Cosmos2VideoToWorldPipeline",
        "Cosmos2_5_PredictBasePipeline",
    ),
    refused={"Cosmos2_5_TransferPipeline": "has half of its attention in a network for control"},
    caches=("taylorseer", "guidance"),
    # the call defaults of diffusers' Cosmos2_5_PredictBasePipeline, and the frame rate of its
    # examples.
    defaults=Defaults(
        family="Cosmos",
        frames=93,
        width=1280,
        height=704,
        steps=36,
        guidance=7.0,
        fps=16,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.2,
        source="between FG-Attn's shares for other models; none is published for this one",
    ),
)

COSMOS_3: Final = Family(
    name="Cosmos 3",
    adapter="cosmos3",
    # generate runs none, as of Cosmos.
    text_to_video=(),
    other=(
        "Cosmos3OmniPipeline",
        "Cosmos3OmniModularPipeline",
        "Cosmos3DistilledModularPipeline",
    ),
    caches=("taylorseer", "guidance"),
    sound=True,
    # the call defaults of diffusers' Cosmos3OmniPipeline.
    defaults=Defaults(
        family="Cosmos 3",
        frames=189,
        width=1280,
        height=720,
        steps=35,
        guidance=6.0,
        fps=24,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.24,
        source="as LTX-2, which makes sound too; nothing was calibrated or measured on this one",
    ),
)

KANDINSKY_5: Final = Family(
    name="Kandinsky 5",
    adapter="kandinsky5",
    text_to_video=("Kandinsky5T2VPipeline",),
    image_to_video=("Kandinsky5I2VPipeline",),
    vae_tiling=True,
    caches=("taylorseer", "guidance"),
    # the call defaults of diffusers' Kandinsky5T2VPipeline, and the frame rate of its example.
    defaults=Defaults(
        family="Kandinsky 5",
        frames=121,
        width=768,
        height=512,
        steps=50,
        guidance=5.0,
        fps=24,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.2,
        source="between FG-Attn's shares for other models; none is published for this one",
    ),
)

KANDINSKY_6: Final = Family(
    name="Kandinsky 6",
    adapter="kandinsky6",
    # generate runs none: the processor of its text encoder wants torchvision.
    text_to_video=(),
    other=("Kandinsky6TI2VAPipeline",),
    refused={
        "Kandinsky6SRPipeline": "attends by a sparse mask of its own, which its weights were "
        "trained for (NABLA)"
    },
    vae_tiling=True,
    caches=("taylorseer", "guidance"),
    sound=True,
    # the call defaults of diffusers' Kandinsky6TI2VAPipeline.
    defaults=Defaults(
        family="Kandinsky 6",
        frames=121,
        width=768,
        height=512,
        steps=50,
        guidance=5.0,
        fps=24,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.24,
        source="as LTX-2, which makes sound too; nothing was calibrated or measured on this one",
    ),
)

MOTIF_VIDEO: Final = Family(
    name="Motif-Video",
    adapter="motif_video",
    text_to_video=("MotifVideoPipeline",),
    image_to_video=("MotifVideoImage2VideoPipeline",),
    image_twin="MotifVideoImage2VideoPipeline",
    caches=("first-block", "taylorseer", "guidance"),
    # the call defaults of diffusers' MotifVideoPipeline and of its guidance, a component, and the
    # frame rate of its example.
    defaults=Defaults(
        family="Motif-Video",
        frames=121,
        width=1280,
        height=736,
        steps=50,
        guidance=7.5,
        fps=24,
        frame_factor=4,
        size_factor=16,
        dense_steps=0.1,
        source="as HunyuanVideo, whose blocks it has",
    ),
)

MINIMAX_H3: Final = Family(
    name="MiniMax-H3",
    adapter="minimax_h3",
    text_to_video=(),
    other=("MiniMaxH3ModularPipeline",),
    vae_tiling=True,
    caches=("taylorseer",),
    sound=True,
    # the call defaults of diffusers' MiniMaxH3ModularPipeline. guidance is distilled.
    defaults=Defaults(
        family="MiniMax-H3",
        frames=124,
        width=1344,
        height=768,
        steps=50,
        guidance=1.0,
        fps=24,
        frame_factor=17,
        frame_rest=5,
        size_factor=32,
        dense_steps=0.24,
        source="as LTX-2, which makes sound too; nothing was calibrated on this one, nor its "
        "quality measured",
    ),
)

FAMILIES: Final[tuple[Family, ...]] = (
    WAN,
    SKYREELS_V2,
    ANYFLOW,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_15,
    HELIOS,
    COGVIDEOX,
    MOCHI,
    ALLEGRO,
    EASYANIMATE,
    LTX,
    LTX_2,
    COSMOS,
    COSMOS_3,
    KANDINSKY_5,
    KANDINSKY_6,
    MOTIF_VIDEO,
    MINIMAX_H3,
)
"""The supported families."""


def image_pipelines() -> str:
    """The class names that make a video from an image, for error messages."""
    return ", ".join(name for family in FAMILIES for name in family.image_to_video)


def supported_pipelines() -> str:
    """The class names that ``sparsify`` takes, for error messages."""
    return ", ".join(name for family in FAMILIES for name in family.pipelines)
