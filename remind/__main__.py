"""`python -m remind` is the command `remind`; `accelerate launch -m remind train-pra` runs it on several processes."""

from remind.commands import main

if __name__ == "__main__":
    main()
