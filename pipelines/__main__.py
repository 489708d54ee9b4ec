"""``python -m pipelines`` is ``bitledger``."""

from pipelines.cli import main

if __name__ == "__main__":
    main()
