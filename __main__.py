"""`python -m adapt_llm` is the same program as the console script `adapt`."""

from .cli.app import main

if __name__ == "__main__":
    main()
