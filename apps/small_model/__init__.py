"""The small demonstration model: the world it was trained on, its training and its checks.

``world`` and ``text`` draw and caption the clips of ``shapes``, the folder ``scenes`` those of
``scenes``; ``worlds`` says what a world is. ``vae`` and ``train`` learn from them, ``benchmark``
says what that costs, ``export`` writes the diffusers folder that the product ships, with its
``card``; ``fidelity`` and ``vae_psnr`` measure it.
Nothing here imports another room of vidsparse.
"""
