"""The small demonstration model: the world it was trained on, its training and its checks.

``world`` draws captioned clips, ``text`` holds its words, ``vae`` and ``train`` learn from them,
``export`` writes the diffusers folder the product ships, with its ``card``; ``fidelity`` and
``vae_psnr`` measure it.
Nothing here imports another room of vidsparse.
"""
