"""`python -m tilesmith`: the `tilesmith` command."""

from tilesmith.cli import main

if __name__ == "__main__":
    main()
