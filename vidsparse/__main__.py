"""``python -m vidsparse``: the same command line as the ``vidsparse`` script."""

from vidsparse.apps.cli import main

if __name__ == "__main__":
    main()
