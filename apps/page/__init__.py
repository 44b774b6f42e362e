"""The Gradio page of ``vidsparse ui``.

From the inside out, each file with one job:

- ``host``: what the host decides and offers. ``uploads``: what a visitor may hand in. ``guard``:
  what one may ask the server for.
- ``queue``: one job per device, others wait. ``workbench``: what a device holds. ``tasks``: the
  jobs themselves. ``errands``: a job, and how its end is shown.
- ``returns``: who comes back. ``visits``: what one visitor has running. ``gallery``: what one has
  made.
- ``form``: controls to ``GenerateRequest`` and back. ``values``: what they hold, read.
  ``sizes``: sizes and lengths by name. ``choices``: which controls are shown.
- ``draw``: pictures and tables as HTML. ``viewer.js``: synchronised playback.
- ``desk``: between events and queue. ``generate_tab``, ``compare_tab``, ``report_tab``, ``build``:
  the page. ``command``: the command.

Only ``form``, ``choices``, ``desk``, ``listeners``, the tabs and ``build`` import gradio.
"""
