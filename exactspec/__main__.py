"""`python -m exactspec` and the `exactspec` command."""

from exactspec.cli.app import main

if __name__ == "__main__":
    main()
