"""The world of ``scenes``: bodies on ground seen from above, a moving camera, changing light.

``world`` says what a scene is and draws scenes by chance, ``terrain`` paints the ground,
``render`` films a scene, ``captions`` describes it, ``reading`` checks a video against it.
"""
