"""What the tests share: ranks as processes, tiny models, and the one-process oracle."""
