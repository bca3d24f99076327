"""`python -m moereplay`, the same as the command `moereplay`."""

from moereplay.command import main

if __name__ == "__main__":
    main()
